#!/bin/sh
# Makes the secrets of docker-compose.yml, once: .env, and in deploy/secrets one file for each service with its
# own accounts and certificate. Existing files are never changed. Usage:
#
#   sh deploy/make_secrets.sh https://headrace.example.org    # the address of HEADRACE_PUBLIC_URL
set -eu
umask 077
cd "$(dirname "$0")/.."
url=${1:?give the address by which browsers and forges reach the API, such as http://127.0.0.1:8420}
services="api relay sync run checkpoint evaluate rollout grade learn verify publish deploy regrade compare"
users_of_code="api sync rollout grade regrade" # the clients of the service that runs user code
folder=deploy/secrets

if [ -e $folder ]; then
    echo "$folder exists already; remove it to make new accounts, then start everything again" >&2
    exit 1
fi
if ! command -v openssl >/dev/null; then
    echo "openssl is missing, which makes the certificates; install it" >&2
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
stores=
admin=$(random)
users="user_kafka=\"$admin\""
for service in $services; do
    database=$(random)
    kafka=$(random)
    store=$(random)
    cat >$folder/$service.env <<END
HEADRACE_DATABASE_URL=postgresql://headrace_$service:$database@postgres:5432/headrace
HEADRACE_KAFKA_USERNAME=headrace_$service
HEADRACE_KAFKA_PASSWORD=$kafka
AWS_ACCESS_KEY_ID=headrace-$service
AWS_SECRET_ACCESS_KEY=$store
END
    databases=$databases,$service=$database
    stores=$stores,$service=$store
    users="$users user_headrace_$service=\"$kafka\""
done
# one line for each certificate and key, because an environment file has one for each variable
pem() {
    printf 'HEADRACE_SANDBOX_TLS_%s=%s\n' "$1" "$(awk '{ printf "%s\\n", $0 }' "$certificates/$2")"
}

certificates=$folder/certificates
sh deploy/make_certificates.sh $certificates $users_of_code
for name in service $users_of_code; do
    file=$name
    if [ $name = service ]; then file=sandbox; fi
    { pem CERT $name.pem; pem KEY $name.key; pem CA ca.pem; } >>$folder/$file.env
done
cat >$folder/accounts.env <<END
HEADRACE_DATABASE_ACCOUNTS=${databases#,}
HEADRACE_S3_ACCOUNTS=${stores#,}
HEADRACE_KAFKA_USERNAME=kafka
HEADRACE_KAFKA_PASSWORD=$admin
END
module="org.apache.kafka.common.security.plain.PlainLoginModule required"
echo "KAFKA_LISTENER_NAME_CLIENTS_PLAIN_SASL_JAAS_CONFIG=\
'$module username=\"kafka\" password=\"$admin\" $users;'" >$folder/kafka.env
echo "made .env and $folder; keep a copy of HEADRACE_SECRET_KEY with your backups"
