#!/bin/sh
# Makes the secrets of docker-compose.yml, once: .env, and in deploy/secrets one file for each service with its
# own accounts. Existing files are never changed. Usage:
#
#   sh deploy/make_secrets.sh https://headrace.example.org    # the address of HEADRACE_PUBLIC_URL
set -eu
umask 077
cd "$(dirname "$0")/.."
url=${1:?give the address by which browsers and forges reach the API, such as http://127.0.0.1:8420}
services="api relay sync run checkpoint evaluate rollout grade learn verify publish deploy"
folder=deploy/secrets

if [ -e $folder ]; then
    echo "$folder exists already; remove it to make new accounts, then start everything again" >&2
    exit 1
fi

random() {
    od -An -v -tx1 -N 32 /dev/urandom | tr -d ' \n'
}

if [ ! -e .env ]; then
    while IFS= read -r line; do
        case $line in
        HEADRACE_PUBLIC_URL=) echo "$line$url" ;;
        *=) echo "$line$(random)" ;;
        *) echo "$line" ;;
        esac
    done <.env.example >.env
fi

mkdir $folder
databases=
for service in $services; do
    database=$(random)
    echo "HEADRACE_DATABASE_URL=postgresql://headrace_$service:$database@postgres:5432/headrace" \
        >$folder/$service.env
    databases=$databases,$service=$database
done
echo "HEADRACE_DATABASE_ACCOUNTS=${databases#,}" >$folder/accounts.env
echo "made .env and $folder; keep a copy of HEADRACE_SECRET_KEY with your backups"
