//! Scenarios built into the program, so that a bare name works from any directory.

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        static SHIPPED: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("../../../scenarios/", $name, ".toml")))),*
        ];
    };
}

shipped![
    "accumulation",
    "compile-blocks",
    "compile-full",
    "compile-regions",
    "cuda-graph-full",
    "cuda-graph-scopes",
    "gpt-oss-20b-8xh100",
    "gpt2-tiny",
    "llama-tiny",
    "llama3-405b-1024xh100",
    "llama3-70b-64xh100",
    "llama3-70b-hfsdp",
    "llama3-70b-hsdp",
    "llama3-70b-qlora-8xh100",
    "llama3-8b-4xh200",
    "llama3-8b-4xh200-fastest",
    "llama3-8b-4xh200-fp8",
    "llama3-8b-8xh100",
    "llama3-8b-lora-8xh100",
    "llama3.2-1b-4xh200",
    "llama3.2-3b-ddp",
    "llama3.2-3b-zero1",
    "llama3.2-3b-zero2",
    "llama3.2-3b-zero3",
    "lora-tiny",
    "mixtral-8x7b-16xh100",
    "offload",
    "peers-1b",
    "peers-1b-megatron-v2",
    "peers-3b",
    "peers-8b",
    "peers-a3b-12l-64e",
    "peers-mixtral-4l",
    "peers-tiny",
    "prefetch-0",
    "prefetch-1",
    "prefetch-2",
    "qwen3-30b-a3b-8xh100",
    "qwen3-30b-a3b-8xh100-ep8",
    "qwen3-tiny",
    "recompute-selective",
    "small-accumulation",
    "small-blocks",
    "small-cnn",
    "small-ddp",
    "small-double-buffer",
    "small-encoder",
    "small-engines",
    "small-fp8",
    "small-fp8-blocks",
    "small-fp8-gather",
    "small-frozen",
    "small-fsdp2",
    "small-full",
    "small-fused",
    "small-gpt2",
    "small-hfsdp",
    "small-hsdp",
    "small-in-backward",
    "small-iteration",
    "small-linear",
    "small-lora",
    "small-lora-fsdp2",
    "small-megatron",
    "small-megatron-pr4435",
    "small-megatron-v2",
    "small-merged",
    "small-moe",
    "small-moe-ep",
    "small-native",
    "small-next-step",
    "small-no-sync",
    "small-offload",
    "small-pointwise",
    "small-qlora",
    "small-qwen3",
    "small-recompute",
    "small-regions",
    "small-scopes",
    "small-selective",
    "small-summed",
    "small-tensor-parallel",
    "small-units",
    "small-zero1",
    "small-zero2",
    "sweep-prefetch",
    "toy-cnn",
    "toy-linear",
    "toy-transformer",
    "transformers-1b",
];

/// Returns name (file stem) and text of every shipped scenario, sorted by name.
#[must_use]
pub fn shipped() -> &'static [(&'static str, &'static str)] {
    SHIPPED
}

/// Families of shipped scenarios that tests and benchmarks use; the others are examples.
const FIXTURES: [&str; 3] = ["small-", "toy-", "peers-"];

/// Returns whether a shipped scenario is an example, rather than one made for tests and benchmarks.
#[must_use]
pub fn is_example(name: &str) -> bool {
    !FIXTURES.iter().any(|family| name.starts_with(family))
}

/// Returns name and text of a shipped scenario; `name` may have the file ending.
#[must_use]
pub fn find_shipped(name: &str) -> Option<(&'static str, &'static str)> {
    let stem = name.strip_suffix(".toml").unwrap_or(name);
    SHIPPED.iter().copied().find(|(n, _)| *n == stem)
}
