//! Experts in parallel with a second layer of attention (LongCat-Flash).

use super::Block;
use super::experts::Experts;
use crate::config::{Family, Model};
use crate::ir::{ModuleId, ModuleKind};
use crate::models::declare::Declare;

/// The second half of a block, and experts. Their output is added after the second half.
pub(super) struct Shortcut {
    /// Experts with the same input as the first dense layer.
    pub(super) experts: Experts,
    pub(super) second: Box<Block>,
}

impl Shortcut {
    /// Declares them, if the model has any.
    pub(super) fn new(d: &mut Declare, block: ModuleId, m: &Model, layer: usize) -> Option<Self> {
        if m.family != Family::Moe || !m.options.experts.shortcut_experts {
            return None;
        }
        let mut plain = m.clone();
        plain.options.experts.shortcut_experts = false;
        let at = d.module(block, "second", ModuleKind::Layer);
        let second = Box::new(Block::new(d, at, &plain, layer));
        let experts = Experts::named(d, block, "shortcut", &plain, [false; 3]);
        Some(Self { experts, second })
    }
}
