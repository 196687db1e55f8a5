#!/bin/bash
# Makes a certificate authority, and the certificate of the servers in the tests of guests'
# networks, with openssl. The argument is the folder for ca.pem, server.pem and server.key.
set -euo pipefail

mkdir -p "$1"
cd "$1"
for name in ca server; do
    openssl ecparam -name prime256v1 -genkey -noout -out $name.key
done
valid=(-days 36500)
openssl req -x509 -key ca.key "${valid[@]}" -out ca.pem -subj "/CN=firn's tests" \
    -addext keyUsage=critical,keyCertSign
openssl req -x509 -key server.key "${valid[@]}" -out server.new -subj /CN=server.test \
    -CA ca.pem -CAkey ca.key -addext basicConstraints=critical,CA:FALSE \
    -addext subjectAltName=DNS:server.test,DNS:six.test,DNS:s3.test
rm ca.key
# Last: it tells make that the others are there.
mv server.new server.pem
