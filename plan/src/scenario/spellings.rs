//! Other spellings of values: those of PyTorch, torchtitan and DeepSpeed.

use super::keys::Accept;
use super::value::{Datum, Entry, Value};
use crate::ir::DType;

/// A spelling that is accepted, and the value that it means. It applies to every key that takes
/// this value. Those of element types are [`DType`]'s aliases.
const SPELLINGS: &[(&str, &str)] = &[
    ("ddp", "no_shard"),
    ("zero1", "optim"),
    ("zero2", "optim_grads"),
    ("zero3", "optim_grads_params"),
    // torch.distributed.fsdp.ShardingStrategy. What is replicated in a hybrid follows from
    // mesh.dp_replicate.
    ("NO_SHARD", "no_shard"),
    ("SHARD_GRAD_OP", "optim_grads"),
    ("FULL_SHARD", "optim_grads_params"),
    ("HYBRID_SHARD", "optim_grads_params"),
    ("_HYBRID_SHARD_ZERO2", "optim_grads"),
    // torch.distributed.tensor.Shard.
    ("shard", "flat"),
    // Liger Kernel never makes the full logits either.
    ("fused_linear_cross_entropy", "chunked"),
    ("cross_entropy", "materialized"),
    ("fully_shard", "fsdp2"),
    ("megatron-fsdp", "megatron"),
    ("megatron_fsdp", "megatron"),
    ("megatron-fsdp-v2", "megatron_v2"),
    ("megatron_fsdp_v2", "megatron_v2"),
    ("mfsdp2", "megatron_v2"),
];

/// Returns the other spellings of a value.
pub(super) fn of(value: &str) -> impl Iterator<Item = &'static str> {
    let same = move |(_, meant): &(&str, &str)| *meant == value;
    all().filter(same).map(|(spelled, _)| spelled)
}

/// Returns every spelling with its value.
fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    let dtypes = DType::ALL.into_iter().flat_map(|d| {
        let n = d.numeric();
        n.aliases.iter().map(|alias| (*alias, n.name))
    });
    dtypes.chain(SPELLINGS.iter().copied())
}

/// Other names of keys of inline tables.
const FIELDS: &[(&str, &str)] = &[("dp_outer", "dp_replicate")];

/// Returns the value with the words that a key takes, where it has other spellings of them.
pub(super) fn resolved(accepts: &[Accept], value: Value) -> Value {
    let datum = match value.datum {
        Datum::Str(word) => Datum::Str(resolved_word(accepts, word)),
        Datum::Array(items) => {
            let of: Vec<Accept> = accepts.iter().filter_map(Accept::items).collect();
            Datum::Array(items.into_iter().map(|v| resolved(&of, v)).collect())
        }
        Datum::Table(entries) => Datum::Table(resolved_fields(accepts, entries)),
        other => other,
    };
    Value { datum, ..value }
}

fn resolved_word(accepts: &[Accept], word: String) -> String {
    let is_taken = |word: &str| {
        let takes = |a: &Accept| matches!(a, Accept::Choice(words) if words.contains(&word));
        accepts.iter().any(takes)
    };
    match all().find(|(spelled, _)| *spelled == word) {
        Some((_, meant)) if is_taken(meant) => meant.to_owned(),
        _ => word,
    }
}

fn resolved_fields(accepts: &[Accept], mut entries: Vec<Entry>) -> Vec<Entry> {
    let fields = accepts.iter().filter_map(Accept::fields).flatten();
    for (name, accept) in fields {
        let others = FIELDS.iter().filter(|(_, meant)| meant == name);
        let mut spelled = others.map(|(other, _)| *other);
        let at = |name: &str| entries.iter().position(|e| e.key == name);
        if let Some(i) = at(name).or_else(|| spelled.find_map(at)) {
            let entry = &mut entries[i];
            (*name).clone_into(&mut entry.key);
            entry.value = resolved(std::slice::from_ref(accept), entry.value.clone());
        }
    }
    entries
}
