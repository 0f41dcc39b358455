//! Other spellings of values: those of PyTorch, torchtitan and DeepSpeed.

use super::keys::Accept;
use super::value::{Datum, Value};
use crate::ir::DType;

/// A spelling that is accepted, and the value that it means. It applies to every key that takes
/// this value. Those of element types are [`DType`]'s aliases.
const SPELLINGS: &[(&str, &str)] = &[
    ("ddp", "no_shard"),
    ("zero1", "optim"),
    ("zero2", "optim_grads"),
    ("zero3", "optim_grads_params"),
    // torch.distributed.fsdp.ShardingStrategy. What is replicated in a hybrid follows from
    // mesh.dp_outer.
    ("NO_SHARD", "no_shard"),
    ("SHARD_GRAD_OP", "optim_grads"),
    ("FULL_SHARD", "optim_grads_params"),
    ("HYBRID_SHARD", "optim_grads_params"),
    ("_HYBRID_SHARD_ZERO2", "optim_grads"),
    ("fully_shard", "fsdp2"),
    ("megatron-fsdp", "megatron"),
    ("megatron_fsdp", "megatron"),
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

/// Returns the value with the word that a key takes, where it is another spelling of one.
pub(super) fn resolved(accepts: &[Accept], value: Value) -> Value {
    let meant = match &value.datum {
        Datum::Str(word) => all().find(|(spelled, _)| spelled == word),
        _ => None,
    };
    let is_taken = |word: &str| {
        let takes = |a: &Accept| matches!(a, Accept::Choice(words) if words.contains(&word));
        accepts.iter().any(takes)
    };
    match meant {
        Some((_, word)) if is_taken(word) => Value {
            datum: Datum::Str(word.to_owned()),
            ..value
        },
        _ => value,
    }
}
