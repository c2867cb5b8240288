# The door to everything; the work is done by cargo and the scripts in dev/.
.DEFAULT_GOAL := help
.PHONY: help up down wipe stack-status build fmt lint test test-unit demo deny

help: ## This list
	@echo 'Recant. The two to start with:  make demo  (watch it work)   make test  (check every promise)'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'STACK=native or STACK=containers forces what carries the servers, for example: make up STACK=native'
	@echo 'A shell that finds the running servers:  eval "$$(dev/env)"'

up: ## Start Postgres, Kafka and two Redis; harmless when they run
	@dev/up

down: ## Stop them; the data stay
	@dev/down

wipe: ## Stop them and delete their data
	@dev/wipe

stack-status: ## What runs and answers, where, and where its log is
	@dev/status

build: rust ## Build relay and subscriber into target/debug
	cargo build --workspace --bins

fmt: rust ## Format all Rust code
	cargo fmt --all

lint: rust ## clippy and rustdoc, warnings are errors
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --document-private-items

test: ## Everything: format, lints, docs, every test on real servers
	@dev/test

test-unit: rust ## The tests that need no server
	cargo test --workspace --lib --bins

demo: ## Two regions live for 20 seconds; KEEP=1 leaves it running
	@dev/demo

deny: rust ## Licences, bans and sources of all dependencies
	@cargo deny --version >/dev/null 2>&1 || { echo 'cargo-deny is missing; install it: cargo install --locked cargo-deny' >&2; exit 1; }
	cargo deny check licenses bans sources

.PHONY: rust
rust:
	@command -v cargo >/dev/null || { echo "Rust is missing: 'cargo' is not on PATH; install it with rustup (https://rustup.rs)" >&2; exit 1; }
