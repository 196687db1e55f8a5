# Two commands matter: `make demo` and `make test`. Both do all the set-up, and keep what they build: the programs in cargo's target
# folder, the downloads and the files made from them in firn's cache (FIRN_CACHE, or ~/.cache/firn).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build

target := $(or $(CARGO_TARGET_DIR),target)/x86_64-unknown-linux-gnu
firn := $(target)/release/firn
agent := $(target)/release/firn-agent
cache := $(or $(FIRN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/firn)
sudo := $(if $(filter-out 0,$(shell id -u)),sudo)

# Linux guests run under this machine's own KVM, or else in the lab; guests in ring 3 under any KVM, or else in the lab.
kvm := $(shell test -w /dev/kvm && echo yes)
hardware := $(if $(kvm),$(shell grep -qwE 'vmx|svm' /proc/cpuinfo && echo yes))
guests := $(if $(hardware),guest,lab)

# The parts of this machine that tests have to find, instead of passing without them (tests/required).
disk := $(if $(filter-out tmpfs ramfs,$(shell stat -f -c %T "$${TMPDIR:-/tmp}")),yes)
export FIRN_REQUIRE := $(if $(kvm),kvm),$(if $(disk),disk),$(if $(sudo),,root)

# Sets the shell's `binary` to the program that a cargo command builds: $(call find,COMMAND,NAME)
find = binary=$$(cargo $(1) --no-run --message-format=json-render-diagnostics \
    | sed -nE 's/.*"name":"$(2)".*"executable":"([^"]+)".*/\1/p' | tail -n 1); \
    test -n "$$binary" || { echo "cargo names no program $(2) for: cargo $(1)" >&2; exit 1; }

.NOTPARALLEL:
.PHONY: setup python pip build guest lab clients images demo test test-full long-guest-tests matrix restores-table unit-tests monitor-tests lab-tests guest-tests test-workloads bench traces lint deny clean

setup:
	@command -v cargo >/dev/null || { echo "cargo is missing: install Rust (rustup) first" >&2; exit 1; }
	@command -v cc >/dev/null || { $(sudo) apt-get -q update && $(sudo) apt-get -qy install gcc libc6-dev; }

# The agent's unit tests run functions on the host, in a Python of its own.
python: setup
	@command -v python3 >/dev/null || { $(sudo) apt-get -q update && $(sudo) apt-get -qy install python3; }

# The clients that the daemon is tested with are wheels.
pip: python
	@python3 -m pip --version >/dev/null 2>&1 || { $(sudo) apt-get -q update && $(sudo) apt-get -qy install python3-pip; }

build: setup
	cargo build --release -p firn -p firn-agent

guest: build
	guest/build.sh
	guest/image.sh base
	guest/initramfs.sh $(agent)

lab: build
	$(firn) lab build

# The larger root file systems of the functions: numpy; torch and scikit-learn; ffmpeg and OpenCV. `make test` needs none of them.
images: build
	for image in science learning media; do $(firn) image build $$image; done

# boto3 and the aws command, for the daemon's tests.
clients: pip
	tests/clients/build.sh

demo: $(guests)
	$(firn) demo

# The guests' tests come last, so that the last line is their result.
test: lint unit-tests $(if $(kvm),,monitor-tests) $(if $(hardware),,lab-tests) guest-tests

# The tests that take a KVM: modules of unit tests, and whole programs of firn's. Without a KVM unit-tests skips the modules (in the programs each
# test looks for a KVM itself, and passes), and monitor-tests runs all of both in the lab. (lost is in lab-tests: KVM meets its faults in another way there.)
kvm-modules := microvm:: player:: floor:: commands::profile::
kvm-programs := bad_profiles bench capacity drift paged_planners pager pool_refusals

unit-tests: python
	cargo test --workspace --exclude firn-tests $(if $(kvm),,-- $(addprefix --skip ,$(kvm-modules)))

# Has the lab get a program and adds it to a list of the shell's: $(call take,COMMAND,NAME,LIST)
take = $(call find,$(1),$(2)); set -- "$$@" --in "$$binary"; $(3)+=" /in/$$(basename "$$binary")"

# In the lab: programs of firn's look for it where cargo built it.
built := $(abspath $(target))/debug
with-firn = mkdir -p $(built); ln -s /bin/firn $(built)/firn
monitor-tests: lab
	@set --; modules=; programs=; \
	$(call take,test -p firn-vmm --lib,firn_vmm,modules); \
	$(call take,test -p firn-bench --lib,firn_bench,modules); \
	$(call take,test -p firn --bin firn,firn,modules); \
	$(foreach program,$(kvm-programs),$(call take,test -p firn --test $(program),$(program),programs);) \
	$(firn) lab run --cpus 1 --timeout 3600 "$$@" --env FIRN_REQUIRE=kvm,root,disk -- sh -c "$(with-firn); \
	    failed=; \
	    for program in $$modules; do \$$program --test-threads=1 $(kvm-modules) || failed=1; done; \
	    for program in $$programs; do \$$program --test-threads=1 || failed=1; done; \
	    test -z \"\$$failed\""

lab-tests: lab
	cargo test -p firn --test lab --test lab_interrupts --test lab_pool -- --ignored --test-threads=1
	@$(call find,test -p firn-memory --lib,firn_memory); \
	$(firn) lab run --in "$$binary" -- "/in/$${binary##*/}" --ignored recorders::bpf
	@$(call find,test -p firn --test lost,lost); \
	$(firn) lab run --cpus 1 --in "$$binary" --env FIRN_REQUIRE=kvm,root,disk -- sh -c "$(with-firn); \
	    /in/$${binary##*/} --test-threads=1"

# Runs the guests' tests; $(1): more arguments, $(2): how to run them in the lab, by the shell's `lab ARGUMENTS`.
run-guest-tests = $(call find,test -p firn-tests --test microvm,microvm); \
	echo "The guests' tests run $(if $(hardware),under this machine's KVM,in the lab)."; \
	$(if $(hardware), \
	    FIRN=$(abspath $(firn)) "$$binary" --test-threads=1 $(1), \
	    lab() { $(firn) lab run --fsdax --cpus 1 --timeout 3600 --in "$$binary" --in $(cache)/clients --env FIRN_REQUIRE=kvm,root,dax --env FIRN=/bin/firn --env FIRN_CLIENTS=/in/clients \
	        -- "/in/$${binary##*/}" --test-threads=1 $(1) "$$@"; }; $(2))

# Under emulation a second processor makes a lab no faster. Two labs at once do: restores by planner in one, all else in the other.
restores := planners:: pool_thaws:: hugetlbfs:: recording:: dax:: shapes::
in-two-labs = said=$$(mktemp); trap 'kill %1 2>/dev/null || true; rm "$$said"' EXIT; \
	lab $(restores) >"$$said" 2>&1 & \
	failed=; lab $(addprefix --skip ,$(restores)) || failed=1; wait $$! || failed=1; cat "$$said"; test -z "$$failed"

guest-tests: $(guests) clients
	@$(call run-guest-tests,,$(in-two-labs))

# What takes longer than the fifteen minutes of `make test`: the long guests' tests ten minutes in the lab, the matrix an hour.
test-full: test long-guest-tests matrix

long-guest-tests: $(guests) clients
	@$(call run-guest-tests,--ignored,lab)

# The traces that a target replays: TRACES="json-a mmap-b" names some.
replayed = $(or $(TRACES),$(basename $(notdir $(wildcard traces/*.trace))))

# Every planner on every trace, ten players at once, page cache cold and full: each checks every byte of its memory, and one wrong byte fails its
# trace. It is a part of the table of all restores, measured anew, and kept with OUT=FOLDER. The ten are of one snapshot; SHAPES=different gives
# each one of its own, in twice the time. It takes up to 4 GiB in the folder for temporary files (ten times that for snapshots of their own), one
# trace after the other, and 16 GiB of DRAM (bert); half a minute to five minutes a trace.
matrix: SHAPES = ten
matrix: OUT =
matrix: build
	@$(if $(kvm),out="$(OUT)"; test -n "$$out" || { out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; }; \
	$(MAKE) restores-table OUT="$$out" SHAPES="$(SHAPES)"; cat "$$out/restores.md", \
	    echo "the matrix needs a KVM of this machine")

# The one table of all restores: every planner on every trace, page cache cold and full, one microVM and ten, of one snapshot and of ten of their own.
# Each session leaves a file in OUT, and what is there is not measured again: an interrupted run goes on. The papers' images are dense and
# their guests zero nothing, but FaaSnap's; sparse images and sanitised guests come beside them. RUNS and RUNS10: runs of one microVM and of ten; SHAPES
# names some. PLANNERS are named, so that one that fails fails its session. With POOL (a manager's socket) they are all that this host can run, those
# that map from a pool, too, but beside sparse images and sanitised guests: extents have no holes. Ten have a warm-up then, after which their replicas and
# copies are ready.
OUT ?= results
RUNS ?= 3
RUNS10 ?= 1
PLANNERS ?= firecracker,firecracker:readahead=off,dram_cached,snapbpf,reap,faast
SHAPES ?= one ten different sparse sanitised
restores-table: build
	@mkdir -p $(OUT); failed=; \
	session() { file=$(OUT)/$$1.json; test -s "$$file" || $(firn) bench thaw --json "$$file" "$${@:2}" >/dev/null || failed+=" $$1"; }; \
	for shape in $(SHAPES); do for trace in $(replayed); do \
	    how="--cache cold,cached --runs $(RUNS10) --warm-up $(if $(POOL),1,0) --concurrency 10"; \
	    case $$shape in \
	        one) how="--cache cold,cached --runs $(RUNS)" ;; \
	        ten) ;; \
	        different) how+=" --snapshots different" ;; \
	        sparse) session $$trace.sparse --trace $$trace --planner $(PLANNERS),faasnap --cache cold --runs $(RUNS); continue ;; \
	        sanitised) session $$trace.sanitised --trace $$trace --planner $(PLANNERS),faasnap --cache cold --runs $(RUNS) --dense; continue ;; \
	        *) echo "there is no shape $$shape: one, ten, different, sparse, sanitised" >&2; exit 2 ;; \
	    esac; \
	    how+="$(if $(POOL), --pool $(POOL))"; \
	    session $$trace.$$shape --trace $$trace --planner $(if $(POOL),all,$(PLANNERS)) --dense --unsanitised $$how; \
	    session $$trace.$$shape-faasnap --trace $$trace --dense --planner faasnap $$how; \
	done; done; \
	$(firn) bench table $(OUT)/*.json >$(OUT)/restores.md; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# Every function behind the daemon, on its image: long, under emulation (docs/reference/workloads.md says how long). Before them, 1,000 requests to the
# daemon. The image of a user's own is built each time; its packages come from where this computer's apt and pip are configured to.
test-workloads: $(guests) images
	@$(call find,test -p firn-tests --test microvm,microvm); \
	$(if $(hardware), \
	    FIRN=$(abspath $(firn)) FIRN_INVOCATIONS=1000 "$$binary" serve::crashes, \
	    $(firn) lab run --timeout 3600 --in "$$binary" --env FIRN=/bin/firn --env FIRN_INVOCATIONS=1000 -- "/in/$${binary##*/}" serve::crashes)
	@$(call find,test -p firn-tests --test workloads,workloads); \
	own=$$(mktemp -d); trap 'rm -rf "$$own"' EXIT; \
	$(firn) image build --packages python3-yaml --requirements tests/functions/own_image/requirements.txt --out "$$own/own.erofs"; \
	$(if $(hardware), \
	    FIRN=$(abspath $(firn)) FIRN_FUNCTIONS=$(abspath guest/functions) FIRN_OWN_IMAGE="$$own/own.erofs" "$$binary" --test-threads=1 --nocapture, \
	    $(firn) lab run --timeout 7200 --in "$$binary" --in guest/functions --in "$$own/own.erofs" --env FIRN=/bin/firn \
	        --env FIRN_FUNCTIONS=/in/functions --env FIRN_OWN_IMAGE=/in/own.erofs -- "/in/$${binary##*/}" --test-threads=1 --nocapture)

# Does a thaw's own work grow with guest memory? Where there is a KVM: how far is the player from a bare loop, and how far are
# the planners from each other?
bench: $(guests)
	@$(call find,bench -p firn --bench thaw_growth,thaw_growth); \
	echo "It runs $(if $(hardware),under this machine's KVM,in the lab, where only the ratio means something)."; \
	$(if $(hardware), \
	    FIRN=$(abspath $(firn)) FIRN_FUNCTIONS=guest/functions "$$binary" --bench, \
	    $(firn) lab run --in "$$binary" --in guest/functions --env FIRN=/bin/firn --env FIRN_FUNCTIONS=/in/functions \
	        -- "/in/$${binary##*/}" --bench)
	$(if $(kvm),$(firn) bench floor)
	$(if $(and $(kvm),$(if $(sudo),,root)),$(firn) bench floor --leaves 2m)
	$(if $(kvm),$(firn) bench thaw --trace sequential-read:64M --runs 10)

# Records the traces that are missing, or those of FUNCTIONS="json image" again, in labs that count instructions: one for each function, so
# that the traces of the others stay where one fails.
recorded = $(and $(wildcard traces/$(1)-a.trace),$(wildcard traces/$(1)-b.trace))
traces: lab images
	@failed=; \
	for function in $(or $(FUNCTIONS),$(foreach name,$(notdir $(wildcard guest/functions/*)),$(if $(call recorded,$(name)),,$(name)))); do \
	    $(firn) lab run --icount --timeout 3600 --in guest/functions --in traces/record.sh --out traces -- sh /in/record.sh "$$function" \
	        || failed+=" $$function"; \
	done; \
	test -z "$$failed" || { echo "not recorded:$$failed" >&2; exit 1; }

lint: setup
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings

deny:
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is missing: cargo install cargo-deny" >&2; exit 1; }
	cargo deny check

# The cache is kept: remove its folder to build the lab and the guest anew.
clean:
	cargo clean
