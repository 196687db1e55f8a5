target_dir := $(or $(CARGO_TARGET_DIR),target)/x86_64-unknown-linux-gnu
firn := $(target_dir)/release/firn

.PHONY: build lab
build:
	cargo build --release -p firn -p firn-agent

# What is built in the cache is kept, so this is quick the second time.
lab: build
	$(firn) lab build
