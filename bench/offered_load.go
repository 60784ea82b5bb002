// Offers requests with bad keys at a fixed rate, each over a new connection, whether or not the server
// keeps up. Prints one line of JSON with what became of them.
//
// offered_load PORT RATE SECONDS ADDRESSES
//
// ADDRESSES is how many addresses of this machine (127.0.1.1 and following) the connections come from.
// With 0 they come from 127.0.0.1, as those of everybody else.
package main

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	patience = 5 * time.Second
	atOnce   = 4000
)

var refused, reset, late, unsent, other atomic.Int64

func ask(port string, number int, addresses int) {
	dialer := net.Dialer{Timeout: patience}
	if addresses > 0 {
		dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+number%addresses))}
	}
	connection, err := dialer.Dial("tcp", "127.0.0.1:"+port)
	if err != nil {
		count(err)
		return
	}
	defer connection.Close()
	connection.(*net.TCPConn).SetLinger(0)
	connection.SetDeadline(time.Now().Add(patience))
	invented := make([]byte, 5)
	rand.Read(invented)
	_, err = fmt.Fprintf(connection, "GET /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"+
		"Authorization: Bearer hr_%s_%s\r\n\r\n", hex.EncodeToString(invented), strings.Repeat("x", 49))
	if err != nil {
		count(err)
		return
	}
	head := make([]byte, 12)
	if _, err = io.ReadFull(connection, head); err != nil {
		count(err)
	} else if string(head[9:]) == "401" {
		refused.Add(1)
	} else {
		other.Add(1)
	}
}

func count(err error) {
	if failure, ok := err.(net.Error); ok && failure.Timeout() {
		late.Add(1)
	} else {
		reset.Add(1)
	}
}

func main() {
	rate, _ := strconv.Atoi(os.Args[2])
	seconds, _ := strconv.ParseFloat(os.Args[3], 64)
	addresses, _ := strconv.Atoi(os.Args[4])
	room := make(chan struct{}, atOnce)
	var open sync.WaitGroup
	began := time.Now()
	offered := 0
	for {
		passed := time.Since(began).Seconds()
		if passed >= seconds {
			break
		}
		for ; offered < int(passed*float64(rate)); offered++ {
			select {
			case room <- struct{}{}:
				open.Add(1)
				go func(number int) {
					ask(os.Args[1], number, addresses)
					<-room
					open.Done()
				}(offered)
			default:
				unsent.Add(1)
			}
		}
		time.Sleep(time.Millisecond)
	}
	took := time.Since(began).Seconds()
	open.Wait()
	fmt.Printf("{\"seconds\": %.3f, \"offered\": %d, \"refused\": %d, \"reset\": %d, \"late\": %d, \"unsent\": %d, \"other\": %d}\n",
		took, offered, refused.Load(), reset.Load(), late.Load(), unsent.Load(), other.Load())
}
