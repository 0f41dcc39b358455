# docker build --tag shardlab .
# docker run --rm shardlab sim llama3-8b-4xh200
# docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" shardlab sim job.toml

FROM rust:1.95.0-slim-bookworm AS build
WORKDIR /src
# The image's compiler is the pinned one, without the components that a build does not need.
ENV RUSTUP_TOOLCHAIN=1.95.0
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked \
    && install -D target/release/shardlab /out/shardlab

FROM debian:bookworm-slim
# PNG charts draw their labels with a system font.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends fonts-dejavu-core \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 shardlab \
    && install --directory --owner shardlab --group shardlab /work
COPY --from=build /out/shardlab /usr/local/bin/shardlab
COPY LICENSE-MIT LICENSE-APACHE /usr/share/doc/shardlab/
# What the NVIDIA Container Toolkit mounts when the container is started with `--gpus all`: the driver,
# and nvidia-smi. CUDA, cuDNN and NCCL come from a folder that you mount: see docs/how-to/install.md.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER shardlab
WORKDIR /work
ENTRYPOINT ["shardlab"]
CMD ["--help"]
