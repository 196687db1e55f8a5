# `make demo` and `make test` do all the set-up and keep what they build: programs in cargo's target
# folder, downloads and the files made from them in firn's cache (FIRN_CACHE, or ~/.cache/firn).
# Targets that need more than a line are tasks of the crate xtask. `make xtask="cargo xtask
# --dry-run" TARGET` prints the commands of such a target.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

xtask := cargo xtask
target := $(or $(CARGO_TARGET_DIR),target)/x86_64-unknown-linux-gnu
firn := $(target)/release/firn
clones-image := $(target)/clones.erofs
languages := $(target)/languages
certificates := $(target)/certificates
s3-server := $(target)/versitygw
cache := $(or $(FIRN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/firn)
firecracker := $(cache)/firecracker
firecracker-lab = $(firn) lab run --cpus 2 --memory 6G --timeout 1800 $(addprefix --in ,$(wildcard \
    tests/clients/firecracker/*.sh) $(firecracker)/clients $(firecracker)/vmlinux $(firecracker)/bzImage \
    $(firecracker)/root.ext4 $(firecracker)/ssh-key $(target)/release/firn-firecracker $(target)/release/jailer) \
    -- sh /in/l1.sh
in-dax-lab = $(firn) lab run --fsdax --memory 6G --timeout 7200 --in lab/dax-counts.sh --out "$(or $(OUT),results)"
apt-install := $(if $(filter-out 0,$(shell id -u)),sudo) apt-get -qy install
apt-update := $(if $(filter-out 0,$(shell id -u)),sudo) apt-get -q update

.NOTPARALLEL:
.PHONY: setup go recent-go java python pip npm openssl kernel-tools build guest lab guests images curl runtimes \
    clients tools firecracker-clients firecracker-guest demo test test-full lint prose deny unit-tests monitor-tests \
    lab-tests guest-tests lab-and-guest-tests long-guest-tests test-paper test-dax test-snapbpf test-load test-load-short test-tools \
    test-clients test-clients-short test-workloads matrix restores-table bench bench-regression result-pages bench-network traces dax-counts \
    clean

# Cargo itself needs a C compiler to link.
setup:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust (rustup) first" >&2; exit 1; }
	@command -v cc >/dev/null || { $(apt-update) && $(apt-install) gcc libc6-dev; }

# One of the long guests' tests is a function in Go, and another one needs a server in Go.
go: setup
	@command -v go >/dev/null || { $(apt-update) && $(apt-install) golang-go; }

# The S3 server requires Go 1.25, and the program in the guests of Firecracker's clients 1.23. A Go
# from 1.21 on fetches that itself.
recent-go: go
	@[[ $$(go env GOVERSION) =~ ^go1\.(2[1-9]|[3-9][0-9]) ]] || { echo "firn: error: this needs Go 1.21 or newer," \
	    "and has $$(go env GOVERSION): install a newer one (Debian 12 has it in backports)" >&2; exit 1; }

# Another one is a function in Java.
java: setup
	@command -v javac >/dev/null || { $(apt-update) && $(apt-install) default-jdk-headless; }

# The agent's unit tests run functions on the host, in a Python process.
python: setup
	@command -v python3 >/dev/null || { $(apt-update) && $(apt-install) python3; }

# The clients of the daemon's tests are wheels.
pip: python
	@python3 -m pip --version >/dev/null 2>&1 || { $(apt-update) && $(apt-install) python3-pip; }

# The tools of `make test-tools` run on Node 20 or newer.
npm: setup
	@command -v npm >/dev/null || { $(apt-update) && $(apt-install) npm; }

# It makes the certificates of the network's tests.
openssl: setup
	@command -v openssl >/dev/null || { $(apt-update) && $(apt-install) openssl; }

# They compile Linux, and make a root file system.
kernel-tools: setup
	@(PATH=$$PATH:/usr/sbin:/sbin; for program in bc bison flex make mke2fs xz; do command -v $$program || exit; done; \
	    test -f /usr/include/gelf.h) >/dev/null || \
	    { $(apt-update) && $(apt-install) bc bison e2fsprogs flex libelf-dev make xz-utils; }

build: setup
	cargo build --release -p firn -p firn-agent -p firn-firecracker

# The files that a Linux guest boots from.
guest: build
	$(firn) lab build --guest-only

# The lab, and the files for guests.
lab: build
	$(firn) lab build

# `guest` if this machine's KVM runs Linux guests, `lab` otherwise.
guests: setup
	$(xtask) guests

# The larger root file systems of the functions: numpy; torch and scikit-learn; ffmpeg and OpenCV.
# `make test` needs none of them.
images: build
	for image in science learning media; do $(firn) image build $$image; done

# The root image of the clients in the network's tests.
curl: build
	$(firn) image build --from aws --packages curl --out curl

# The root images of the runtimes on Debian 13. `make test` needs none of them.
runtimes: build
	for image in python3.13 java21 nodejs20.x; do $(firn) image build $$image || exit; done

# boto3 and the aws command, for the daemon's tests.
clients: pip
	tests/clients/build.sh

# osls, cdk and sam, for test-tools.
tools: npm pip
	tests/clients/tools.sh

# The tests of firecracker-go-sdk and fctools.
firecracker-clients: recent-go
	tests/clients/firecracker/build.sh

# The kernel and the root file system of the guests in the tests of Firecracker's clients.
firecracker-guest: lab recent-go kernel-tools
	tests/clients/firecracker/kernel.sh
	tests/clients/firecracker/root.sh

# A root image with the wheels of the tests' functions.
$(clones-image): tests/functions/draws/requirements.txt | build
	$(firn) image build --requirements $< --out $@

$(certificates)/server.pem: tests/clients/certificates.sh | openssl
	$< $(@D)

# An S3 server for a folder.
$(s3-server): | recent-go
	GOBIN=$(abspath $(@D)) CGO_ENABLED=0 go install -trimpath -ldflags "-s -w" \
	    github.com/versity/versitygw/cmd/versitygw@v1.8.0

# A root image with the languages of the tests' functions, and the function in Go.
$(languages)/image.erofs: | build
	mkdir -p $(@D)
	$(firn) image build --packages nodejs,openjdk-17-jdk-headless --out $@

# The image of java21 leaves the jars that the functions need in the cache.
$(languages)/shop/Hooks.class: $(wildcard tests/functions/hooks_java/*.java) | java runtimes
	mkdir -p $(languages)
	javac --release 17 -cp "$(cache)/java21/*" -d $(languages) $^

$(languages)/draws-go: tests/functions/draws_go/main.go | go
	mkdir -p $(@D)
	CGO_ENABLED=0 go build -o $@ $<

demo: guests
	$(firn) demo

# lint and unit-tests; monitor-tests without a KVM; guest-tests, with lab-tests if the lab is used.
test: setup
	$(xtask) test

# The tests that take longer than `make test`: the long guests' tests ten minutes in the lab, the
# matrix an hour.
test-full: test long-guest-tests test-paper test-dax test-snapbpf matrix

# Formatting, clippy, documentation, unused dependencies, the style of texts.
lint: setup
	$(xtask) lint

# The style of texts and comments. FOLDER=crates/pool checks one folder.
prose: setup
	$(xtask) prose

# Licences, versions, sources and advisories of the dependencies.
deny: setup
	$(xtask) deny

# Without a KVM the tests that require one are skipped.
unit-tests: clients
	$(xtask) unit-tests

# The tests that require a KVM, in the lab.
monitor-tests: lab
	$(xtask) monitor-tests

lab-tests: lab
	$(xtask) lab-tests

guest-tests lab-and-guest-tests: guests clients curl $(clones-image) $(certificates)/server.pem
	$(xtask) $@

long-guest-tests: guests clients curl runtimes $(clones-image) $(certificates)/server.pem $(s3-server) \
    $(languages)/image.erofs $(languages)/draws-go $(languages)/shop/Hooks.class
	$(xtask) long-guest-tests

# Every function behind the daemon, on its image, and 1,000 requests to the daemon.
test-workloads: guests images
	$(xtask) test-workloads

# 10,000 requests to a daemon whose microVMs are players, then 1,000 with Linux guests, 64 at once,
# while monitors, the pool's manager and the daemon are killed at random. Four labs share the 1,000
# where this machine's KVM runs no Linux. FIRN_SEED=2 kills others of the players.
test-load: guests
	$(xtask) test-load

# 500 requests to players, if this machine has a KVM.
test-load-short: setup
	$(xtask) test-load-short

# The tests of firecracker-go-sdk and fctools, against firn-firecracker with players, and in the lab
# with Linux.
test-clients: test-clients-short firecracker-guest
	$(firecracker-lab) /in/guest.sh /in
	$(firecracker-lab) /in/run.sh linux /in/clients /in

# Those that run with players.
test-clients-short: build firecracker-clients
	cargo build --release -p firn-jailer
	tests/clients/firecracker/run.sh player $(firecracker)/clients $(target)/release

# Every experiment of the papers on a tiny trace, with one run and at most two microVMs at once.
# It needs root and this machine's KVM, and does nothing without them.
test-paper: setup
	cargo test --workspace --test paper -- --ignored

# SnapBPF's prefetch by a BPF program, in a lab with the module that it needs: two minutes.
test-snapbpf: lab
	$(firn) lab build --snapbpf
	$(xtask) test-snapbpf

# Tools that deploy functions, against a daemon without microVMs: half a minute.
test-tools: tools
	cargo test -p firn-api --lib -- --ignored tools_deploy

# Every planner on every trace with ten players at once, page cache cold and full: each player
# checks every byte of its memory. OUT=FOLDER keeps the results. SHAPES=different gives each player
# a snapshot of its own, in twice the time. It takes up to 4 GiB in the folder for temporary files
# (40 GiB with SHAPES=different) and 16 GiB of DRAM (bert), and half a minute to five minutes for
# each trace. TRACES="json-a mmap-b" selects traces.
matrix: build
	$(xtask) matrix

# The table of all restores: every planner on every trace, page cache cold and full, one microVM
# and ten. Each session leaves a file in OUT (results), and existing files are not measured again.
# TRACES, SHAPES (one ten different sparse sanitised) and PLANNERS select sessions; RUNS (3) and
# RUNS10 (1) are the runs of one microVM and of ten; POOL, a manager's socket, adds the planners
# that map from a pool.
restores-table: build
	$(xtask) restores-table

# How a thaw's own work grows with guest memory. With a KVM, also the player against a bare loop,
# and the planners against each other.
bench: guests
	$(xtask) bench

# Whether restores became slower since an earlier run on this host, with players only, in about ten
# minutes. The first run measures what later ones are compared with, in BASE (the folder regression
# in the cache); remove it to begin anew. POOL, a manager's socket, adds the planners of a pool.
bench-regression: build
	$(xtask) bench-regression

# Makes the tables of docs/results anew from the results there (NAME.json). A test compares them.
result-pages: setup
	FIRN_WRITE_PAGES=1 cargo test -p firn-bench --lib paper::page

# The user-mode network beside passt, as root: throughput, processor time, latency and memory, in
# five minutes. PASST is passt's program, by default the installed one. JSON=FILE keeps the results.
bench-network: setup
	cargo bench -p firn-net --bench network -- --passt "$(or $(PASST),passt)" \
	    $(if $(JSON),--json "$(abspath $(JSON))")

# Records the traces that are missing, or those of FUNCTIONS="json image" again.
traces: lab images
	$(xtask) traces

# PASS table 2 and figure 4 in the lab, which has a DAX file system, and counts in place of times:
# of instructions for the table. OUT=FOLDER (results) gets the results, RUNS (11) is their number,
# TRACE is one in place of their own.
dax-counts: lab
	mkdir -p "$(or $(OUT),results)"
	$(in-dax-lab) --icount -- sh /in/dax-counts.sh pass-table-2 --runs $(or $(RUNS),11) $(addprefix --trace ,$(TRACE))
	$(in-dax-lab) -- sh /in/dax-counts.sh pass-figure-4 --runs $(or $(RUNS),11) $(addprefix --trace ,$(TRACE))

# The same on the smallest trace: four minutes.
test-dax:
	$(MAKE) dax-counts TRACE=hello-a RUNS=1 OUT="$(target)/dax-counts"

# The cache is kept. Remove its folder to build the lab and the guest anew.
clean:
	cargo clean
