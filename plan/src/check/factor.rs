//! Factors of gradients: the optimizer reads means over all ranks that take different samples, or
//! sums, but the same for all parameters.

use super::describe;
use super::rules::RuleId;
use super::state::Reduced;
use super::walk::{Walk, Work};
use crate::ir::{Access, RankGroup, ReduceOp};

/// The factor by which gradients are multiplied on their way to the optimizer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor(pub(super) f64);

impl PartialEq for Factor {
    /// Compares up to rounding.
    fn eq(&self, other: &Self) -> bool {
        (self.0 - other.0).abs() <= 1e-9 * self.0.abs().max(other.0.abs())
    }
}

impl Eq for Factor {}

impl Factor {
    /// Returns the factor of a collective over these ranks.
    pub(super) fn of(op: ReduceOp, ranks: Option<RankGroup>) -> Self {
        Self(match op {
            ReduceOp::None | ReduceOp::Sum | ReduceOp::Max => 1.0,
            ReduceOp::Avg => 1.0 / ranks.map_or(1.0, |g| f64::from(g.size)),
            ReduceOp::PremulSum(factor) => factor,
        })
    }

    /// Returns the factor after another one; `None` means 1.
    pub(super) fn product(first: Option<Self>, next: Option<Self>) -> Self {
        Self(first.map_or(1.0, |f| f.0) * next.map_or(1.0, |f| f.0))
    }

    /// Returns the factor of a sum: NaN if the summands have different factors.
    pub(super) fn of_sum(a: Option<Self>, b: Option<Self>) -> Option<Self> {
        match (a, b) {
            (Some(a), Some(b)) if a != b => Some(Self(f64::NAN)),
            (a, b) => a.or(b),
        }
    }
}

impl Walk<'_> {
    /// Checks the factor of a gradient that the optimizer reads. It must be 1 over the number of
    /// ranks that take different samples, or 1 if the loss was already divided by all tokens, or
    /// the factor that the scenario sets. It must also be equal for all gradients.
    pub(super) fn scaled(&mut self, work: &Work, a: Access, read: Reduced) {
        let p = self.p;
        let factor = read.factor.unwrap_or(Factor(1.0));
        self.sink.fact(RuleId::Scale, 1);
        let (wanted, other) = *self.facts.factor.get_or_insert((factor, work.id));
        let ranks = p.meta.mesh.data_ranks();
        let mean = Factor(1.0 / f64::from(ranks));
        let given = p.meta.gradient_factor.map(Factor);
        let right = match given {
            Some(given) => factor == given,
            None => factor == mean || factor == Factor(1.0),
        };
        if factor == wanted && right {
            return;
        }
        let other = (factor != wanted).then_some(other);
        self.violate(RuleId::Scale, work.id, other, || {
            format!(
                "reads {}, which is multiplied by {}; expected {}{}",
                describe::range(p, a),
                factor.0,
                match given {
                    Some(given) => format!("{}, `gradient_scaling_factor`", given.0),
                    None => format!("{} for the mean over {ranks} ranks", mean.0),
                },
                match other {
                    Some(o) => format!(", and the same as in #{}: {}", o.0, wanted.0),
                    None if given.is_none() => ", or 1".to_owned(),
                    None => String::new(),
                }
            )
        });
    }
}
