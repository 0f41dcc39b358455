# Lists the recipes.
default:
    @just --list --unsorted

# Predict a scenario: `just sim llama3-8b-4xh200 --set fsdp.prefetch_forward=0`
sim *arguments:
    cargo run --release --quiet -- sim {{arguments}}

# Everything that a change has to pass
ci:
    .ci/run

# Format the sources
fmt:
    cargo fmt --all

# Clippy, with warnings as errors
lint:
    cargo clippy --locked --workspace --all-targets --features shardlab/frames -- -D warnings

# Tests, or those whose name contains NAME
test *name:
    cargo test --workspace {{name}}

# Accept changed snapshots; read the difference before you commit it
snapshots *name:
    INSTA_UPDATE=always cargo test --workspace {{name}}
    git diff --stat -- '*.snap'

# Compare the small scenarios with their baselines
gate:
    .ci/gate

# Write the baselines after an intended change
bless:
    .ci/gate --bless

# The book, into target/book; needs mdbook and python3
book:
    .ci/book

# API documentation
doc:
    cargo doc --workspace --no-deps --open

# Licenses, sources and known vulnerabilities of the dependencies; needs cargo-deny
deny:
    cargo deny check

# Spelling; needs typos
typos:
    typos

# Build the Python wheel and test it; needs maturin
wheel:
    .ci/wheel

# Test the Python module against the binary of this checkout
python:
    cargo build --release
    SHARDLAB_BIN="$PWD/target/release/shardlab" PYTHONPATH="$PWD/python" \
    python3 -m unittest discover --start-directory python/tests

# The smallest binary, for GPU nodes: `sim` and `exec` without the dashboard, PNG charts and tokenizers
slim:
    cargo build --profile slim --no-default-features --features cuda

# The binary with `runs query` and Parquet
frames:
    cargo build --release --features frames

# Install the binary into ~/.cargo/bin
install:
    cargo install --locked --path .

# The Docker image
docker:
    docker build --tag shardlab .

# Fuzz the scenario parser; needs cargo-fuzz and a nightly compiler
fuzz seconds="60":
    cargo +nightly fuzz run scenario -- -max_total_time={{seconds}}
