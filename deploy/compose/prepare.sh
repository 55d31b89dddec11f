#!/bin/sh
# Makes the secrets of compose.yaml in deploy/compose/secrets: a trial certificate authority, the certificate of the
# broker, and a password for each user and for Grafana. Needs OpenSSL 3. Existing secrets are left as they are.
set -eu
cd "$(dirname "$0")"
# Containers see files with the modes of this clone, which may be too strict for their users, or too loose for the broker.
chmod 0644 ./*.toml ./*.yaml grafana/*.yaml ../monitoring/*.yaml ../monitoring/*.json ../../examples/greetings.py
# Only the owner enters the folder. The files themselves must be readable for the user of the container.
mkdir -p -m 0700 secrets
cd secrets
if [ ! -e broker.pem ]; then
    openssl req -x509 -newkey rsa:2048 -nodes -days 365 -keyout ca.key -out ca.pem -subj '/CN=Trial CA' \
        -addext keyUsage=critical,keyCertSign
    openssl req -x509 -newkey rsa:2048 -nodes -days 365 -keyout broker.key -out broker.pem -subj /CN=broker \
        -addext subjectAltName=DNS:broker,DNS:localhost -addext basicConstraints=CA:FALSE -CA ca.pem -CAkey ca.key
    rm ca.key
fi
for user in operator greetings grafana; do
    [ -e "$user.password" ] || openssl rand -hex 24 > "$user.password"
done
chmod 0444 ./*
