//! Rules for the options of families `decoder`, `moe`, `bert` and `vit`.

mod attention;
mod blocks;
mod encoder;
mod heads;
mod images;
mod per_layer;

pub(super) use images::check_images;

use crate::config::Model;
use crate::models::spec::Conflict;

/// Refuses models of these families whose options do not fit together.
pub(in crate::models) fn check(m: &Model) -> Result<(), Conflict> {
    attention::check_projections(m)?;
    attention::check_chunks(m)?;
    encoder::check_memory(m)?;
    blocks::check_rwkv(m)?;
    blocks::check_shared_block(m)?;
    encoder::check_encoder(m)?;
    per_layer::check_per_layer(m)?;
    heads::check_ends(m)?;
    attention::check_latent(m)?;
    attention::check_values(m)?;
    encoder::check_combinations(m)?;
    attention::check_shared_keys(m)?;
    attention::check_differential(m)?;
    attention::check_groups(m)?;
    attention::check_disentangled(m)?;
    blocks::check_lists(m)?;
    heads::check_heads(m)?;
    images::check_rows(m)?;
    blocks::check_sum(m)
}
