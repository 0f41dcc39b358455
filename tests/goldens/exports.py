"""Loads exports of `exec` in transformers, and compares logits with those of the original.

    python tests/goldens/exports.py SHARDLAB [NAME …]

For every small `config.json` of the tests (`tests/data/configs/tiny--*`, and the goldens) and for the
variants below, transformers makes a model with random weights and saves it. `exec --init FOLDER --export
OTHER` trains it for one step with a learning rate of 0. Then transformers loads both
folders. The script prints the largest difference of logits, and fields of the configurations that differ.
Names are those of the files, without `tiny--` and `.json`.

Results with transformers 5.24 are in docs/reference/models.md.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TWO = ["full_attention", "sliding_attention"]
# Options that are not the defaults of their classes.
VARIANTS = {
    "gemma2-scalar": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 13, "sliding_window": 20}),
    "vaultgemma-scalar": ("vaultgemma", {"head_dim": 8, "query_pre_attn_scalar": 13, "sliding_window": 20}),
    "gemma3_text-types": ("gemma3_text", {"head_dim": 16, "sliding_window": 20, "layer_types": TWO}),
    "smollm3-marks": ("smollm3", {"no_rope_layers": [1, 0]}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "falcon-new": (
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "falcon-heads": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt_neo-types": (
        "gpt_neo",
        {"window_size": 20, "attention_types": [[["local", "global"], 1]]},
    ),
    "opt-post": ("opt", {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "seed_oss-plain": ("seed_oss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "phi-norms": ("phi", {"qk_layernorm": True, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "cohere-norms": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "stablelm-norms": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
}
JOB = """[model]
preset = "config.json"
[train]
seq_len = 32
micro_batch = 1
steps = 1
lr = 0.0
weight_decay = 0.0
[mesh]
hardware = "cpu"
dp_shard = 1
[precision]
param_dtype = "f32"
"""
# Fields that say where a model comes from.
ORIGIN = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def cases():
    """Yields names and configurations."""
    files = sorted((ROOT / "data/configs").glob("tiny--*.json"))
    files += sorted((ROOT / "goldens").glob("*/config.json"))
    for file in files:
        name = file.parent.name if file.name == "config.json" else file.stem.removeprefix("tiny--")
        yield name, lambda file=file: transformers.AutoConfig.from_pretrained(file)
    for name, (kind, fields) in VARIANTS.items():
        fields = {**SIZES, **NO_TOKENS, **fields}
        yield name, lambda kind=kind, fields=fields: transformers.AutoConfig.for_model(kind, **fields)


def make(config, folder):
    """Saves a model with random weights, norms and biases among them."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def load(folder):
    """Returns a model, and how many of its tensors the files lack."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), len(info["missing_keys"]) + len(info["unexpected_keys"])


def compare(binary, config, folder):
    """Returns what became of a model: a word and details."""
    original, exported = folder / "original", folder / "exported"
    make(config, original)
    (original / "tokenizer.json").write_text("{}")
    (original / "job.toml").write_text(JOB)
    (folder / "tokens.bin").write_bytes(bytes(n % 251 for n in range(2048)))
    command = [binary, "exec", original / "job.toml", "--init", original, "--export", exported]
    command += ["--data", folder / "tokens.bin", "--data-dtype", "uint8", "--no-store", "--progress", "none"]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if run.returncode:
        return "refused", run.stderr.strip().replace("\n", " ")[:160]
    a, _ = load(original)
    try:
        b, lost = load(exported)
    except Exception as error:
        return "OTHER", f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
    ids = torch.arange(32)[None] * 5 % min(251, a.config.vocab_size)
    with torch.no_grad():
        expected = a(ids).logits
        worst = (expected - b(ids).logits).abs().max().item() / expected.abs().max().item()
    ours, theirs = b.config.to_dict(), a.config.to_dict()
    other = {k: (theirs.get(k), ours.get(k)) for k in {*ours, *theirs} - ORIGIN if ours.get(k) != theirs.get(k)}
    kept = [name for name in ("tokenizer.json", "generation_config.json") if (original / name).exists()]
    files = [name for name in kept if not (exported / name).exists()]
    equal = worst < 1e-6 and not other and not files
    return "equal" if equal else "OTHER", f"{worst:.1e}, tensors {lost}, fields {json.dumps(other, default=str)}, files {files}"


def main(binary, names):
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts = {}
    for name, config in cases():
        if names and name not in names:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            word, details = compare(binary, config(), folder)
        except Exception as error:  # a class without a language model, or sizes that it refuses
            word, details = "failed", f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
        shutil.rmtree(folder)
        counts[word] = counts.get(word, 0) + 1
        print(f"{name:<28} {word:<8} {details}", flush=True)
    print(counts, "transformers", transformers.__version__)
    return counts.get("OTHER", 0) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
