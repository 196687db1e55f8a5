# Two commands matter: `make demo` and `make test`. Both do all the set-up, and keep what they build: the programs in cargo's target
# folder, the downloads and the files made from them in firn's cache (FIRN_CACHE, or ~/.cache/firn).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

target := $(or $(CARGO_TARGET_DIR),target)/x86_64-unknown-linux-gnu
firn := $(target)/release/firn
agent := $(target)/release/firn-agent
sudo := $(if $(filter-out 0,$(shell id -u)),sudo)

# Linux guests run under this machine's own KVM, or else in the lab.
hardware := $(shell grep -qwE 'vmx|svm' /proc/cpuinfo && test -w /dev/kvm && echo yes)
guests := $(if $(hardware),guest,lab)

.NOTPARALLEL:
.PHONY: setup build guest lab demo test unit-tests lab-tests guest-tests bench lint deny clean

setup:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust (rustup) first" >&2; exit 1; }
	@command -v cc >/dev/null || { $(sudo) apt-get -q update && $(sudo) apt-get -qy install gcc libc6-dev; }

build: setup
	cargo build --release -p firn -p firn-agent

guest: build
	guest/build.sh
	guest/initramfs.sh $(agent)

lab: build
	$(firn) lab build

demo: $(guests)
	$(firn) demo

# The guests' tests come last, so that the last line is their result.
test: lint unit-tests $(if $(hardware),,lab-tests) guest-tests

unit-tests: setup
	cargo test --workspace --exclude firn-tests

lab-tests: lab
	cargo test -p firn --test lab -- --ignored --test-threads=1

guest-tests: $(guests)
	@binary=$$(cargo test -p firn-tests --test microvm --no-run --message-format=json-render-diagnostics \
	    | sed -nE 's/.*"name":"microvm".*"executable":"([^"]+)".*/\1/p'); \
	test -n "$$binary" || { echo "cargo names no test program microvm of firn-tests" >&2; exit 1; }; \
	echo "The guests' tests run $(if $(hardware),under this machine's KVM,in the lab)."; \
	$(if $(hardware), \
	    FIRN=$(abspath $(firn)) "$$binary" --test-threads=1, \
	    $(firn) lab run --timeout 1800 --in "$$binary" --env FIRN=/bin/firn -- "/in/$${binary##*/}" --test-threads=1)

# Does a thaw's own work grow with guest memory?
bench: $(guests)
	@binary=$$(cargo bench -p firn --bench thaw_growth --no-run --message-format=json-render-diagnostics \
	    | sed -nE 's/.*"name":"thaw_growth".*"executable":"([^"]+)".*/\1/p'); \
	test -n "$$binary" || { echo "cargo names no benchmark thaw_growth" >&2; exit 1; }; \
	echo "It runs $(if $(hardware),under this machine's KVM,in the lab, where only the ratio means something)."; \
	$(if $(hardware), \
	    FIRN=$(abspath $(firn)) FIRN_FUNCTIONS=guest/functions "$$binary" --bench, \
	    $(firn) lab run --in "$$binary" --in guest/functions --env FIRN=/bin/firn --env FIRN_FUNCTIONS=/in/functions \
	        -- "/in/$${binary##*/}" --bench)

lint: setup
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings

deny:
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is missing: cargo install cargo-deny" >&2; exit 1; }
	cargo deny check

# The cache is kept: remove its folder to build the lab and the guest anew.
clean:
	cargo clean
