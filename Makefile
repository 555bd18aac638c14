# SPDX-License-Identifier: Apache-2.0
# The human interface; the build itself is CMake (CMakePresets.json).
PREFIX ?= /usr/local

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: ## install what is missing, build, fetch a small model, ask it about a long text
	@scripts/demo

build: ## build/release
	@cmake --preset release && cmake --build --preset release

test: ## all that CI runs: formatting, tidy, gcc, clang, tests, sanitizers (under 20 minutes)
	@scripts/test

test-long: ## thread sanitizer, fuzzing (FUZZ_SECONDS=300 each), repeated stress
	@scripts/test-long

bench: ## speed of the small model at several depths
	@scripts/bench

tidy: ## lengths, include law, banned calls, leftovers
	@scripts/tidy

fmt: ## format C sources in place
	@scripts/fmt

man: build ## man pages from the options table
	@scripts/make-man build/release/kvdrive

fmt-check: ## fail if a C source is not formatted
	@scripts/fmt --check

install: ## build what is installed, no tests, and install it to PREFIX (/usr/local)
	@cmake --preset release && cmake --build --preset release --target kvdrive_product
	@cmake --install build/release --prefix $(PREFIX)

clean-check: ## demo and test of a clean clone in a fresh Debian 12 root (needs root)
	@scripts/clean-check

package-check: ## run the image and the unit of packaging/ on a fresh Debian 12 (needs root)
	@scripts/package-check

.PHONY: help demo build test test-long bench tidy fmt fmt-check man install clean-check package-check
