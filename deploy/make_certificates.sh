#!/bin/sh
# Makes the certificates with which a sandbox service and its clients know each other (needs openssl). In FOLDER:
# ca.pem and ca.key, an authority for nothing else; service.pem and service.key, for the service; and NAME.pem and
# NAME.key for each client. Existing files are never changed, so further clients can be added later. Usage:
#
#   sh deploy/make_certificates.sh FOLDER NAME...
#
# Anybody who has ca.key can make certificates, so keep it where no service reads it. A certificate lasts ten years and
# cannot be revoked. If a key becomes known, use a new folder and give all services the new files.
set -eu
umask 077
days=3650
folder=${1:?give a folder for the certificates, and the names of clients}
shift
mkdir -p "$folder"
config=$folder/openssl.cnf
cat >"$config" <<'END'
[req]
distinguished_name = subject
[subject]
[ca]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[service]
extendedKeyUsage = serverAuth
subjectAltName = DNS:headrace-sandbox
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[client]
extendedKeyUsage = clientAuth
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END

# make_key NAME: a new private key, which appears whole or not at all
make_key() {
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$folder/$1.key.new" 2>/dev/null
    mv "$folder/$1.key.new" "$folder/$1.key"
}

# make_certificate NAME KIND
make_certificate() {
    if [ -e "$folder/$1.pem" ]; then return; fi
    make_key "$1"
    openssl req -new -config "$config" -key "$folder/$1.key" -subj "/CN=$1" -out "$folder/$1.csr"
    openssl x509 -req -in "$folder/$1.csr" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -days $days \
        -set_serial "0x$(openssl rand -hex 16)" -extfile "$config" -extensions "$2" \
        -out "$folder/$1.pem.new" 2>/dev/null
    mv "$folder/$1.pem.new" "$folder/$1.pem"
    rm "$folder/$1.csr"
}

if [ ! -e "$folder/ca.pem" ]; then
    make_key ca
    openssl req -x509 -new -config "$config" -extensions ca -key "$folder/ca.key" \
        -subj "/CN=headrace sandbox authority" -days $days -out "$folder/ca.pem.new"
    mv "$folder/ca.pem.new" "$folder/ca.pem"
fi
make_certificate service service
for name in "$@"; do
    make_certificate "$name" client
done
rm "$config"
