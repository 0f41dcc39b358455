//! Properties that the rate of a matmul depends on, other than its shape.

use super::{BodyOp, DType, Kernel, KernelClass, OpKind, Slot};
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// What shares a scale in an 8-bit matmul (`precision.float8_recipe`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleMode {
    /// Each factor.
    Tensorwise,
    /// Each row of `a` and each column of `b`.
    Rowwise,
    /// Blocks of 128 or 128x128 elements.
    Blockwise,
    /// 32 elements along the inner dimension.
    Mxfp8,
}

impl ScaleMode {
    /// The names in profiles, which are those of recipes.
    pub const WORDS: &'static [&'static str] = &["tensorwise", "rowwise", "blockwise", "mxfp8"];

    /// Returns the name in profiles.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::WORDS[self as usize]
    }

    /// Returns the mode of a matmul from its factors and the reciprocals of their scales.
    fn of(factors: [&Slot; 2], inverses: [&Slot; 2]) -> Self {
        let numel = |slot: &Slot| slot.shape.iter().product::<u64>();
        let per_row = |n: usize| {
            let columns = factors[n].shape.last().copied().unwrap_or(1);
            numel(inverses[n]) * columns == numel(factors[n])
        };
        if inverses.iter().any(|slot| slot.dtype == DType::U8) {
            Self::Mxfp8
        } else if inverses.iter().all(|slot| numel(slot) == 1) {
            Self::Tensorwise
        } else if per_row(0) && per_row(1) {
            Self::Rowwise
        } else {
            Self::Blockwise
        }
    }
}

/// How an 8-bit matmul scales its factors and accumulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Float8Gemm {
    /// What shares a scale.
    pub scaling: ScaleMode,
    /// Whether it accumulates with the precision of tensor cores (`use_fast_accum`) instead of
    /// float32.
    pub fast_accum: bool,
}

impl Float8Gemm {
    /// One scale per factor, and accumulation with the precision of tensor cores, which is the
    /// fastest kind.
    pub const FASTEST: Self = Self {
        scaling: ScaleMode::Tensorwise,
        fast_accum: true,
    };

    /// Returns how an operation scales and accumulates; `None` if it is not an 8-bit matmul.
    fn of(op: &BodyOp) -> Option<Self> {
        let fast_accum = op.op.float8_fast_accum()?;
        let [a, b, of_a, of_b, ..] = &op.inputs[..] else {
            return None;
        };
        Some(Self {
            scaling: ScaleMode::of([a, b], [of_a, of_b]),
            fast_accum,
        })
    }
}

/// Properties that the rate of a matmul depends on, other than its shape. Profiles have a table for
/// each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GemmKind {
    /// Element type of the factors.
    pub dtype: DType,
    /// For 8-bit factors.
    pub float8: Option<Float8Gemm>,
}

impl GemmKind {
    /// Returns the kind of a matmul whose factors have the same type. For 8-bit types, returns the
    /// fastest kind.
    #[must_use]
    pub fn of(dtype: DType) -> Self {
        let dtype = dtype.rated();
        Self {
            dtype,
            float8: dtype.float8_max().map(|_| Float8Gemm::FASTEST),
        }
    }

    /// Returns the kind with additional properties of its 8-bit matmuls. Other kinds do not change.
    #[must_use]
    pub fn refined(self, scaling: Option<ScaleMode>, fast_accum: Option<bool>) -> Self {
        let float8 = self.float8.map(|of| Float8Gemm {
            scaling: scaling.unwrap_or(of.scaling),
            fast_accum: fast_accum.unwrap_or(of.fast_accum),
        });
        Self { float8, ..self }
    }
}

impl From<DType> for GemmKind {
    fn from(dtype: DType) -> Self {
        Self::of(dtype)
    }
}

impl DType {
    /// Returns the type whose rates in profiles apply to kernels on this type. Devices move and
    /// multiply both 8-bit floating-point types at the same rate.
    #[must_use]
    pub fn rated(self) -> Self {
        match self {
            Self::F8E5m2 => Self::F8E4m3,
            other => other,
        }
    }
}

impl OpKind {
    /// Returns whether elementwise code may be fused into it as an epilogue.
    #[must_use]
    pub const fn takes_epilogue(&self) -> bool {
        matches!(self, Self::Gemm(_) | Self::GroupedGemm(_))
    }

    /// Returns whether an 8-bit matmul accumulates with the precision of tensor cores; `None` for
    /// other operations. Its inputs are two factors, the reciprocals of their scales, and others.
    #[must_use]
    pub fn float8_fast_accum(&self) -> Option<bool> {
        match self {
            Self::ScaledGemm(gemm) => Some(gemm.fast),
            Self::ScaledGroupedGemm(gemm) => Some(gemm.fast),
            Self::ScaledGroupedGemmWeightGrad(_) => Some(false),
            _ => None,
        }
    }
}

impl Kernel {
    /// Returns how the kernel's 8-bit matmuls scale and accumulate; `None` if it has none.
    #[must_use]
    pub fn float8_gemm(&self) -> Option<Float8Gemm> {
        self.body.iter().find_map(Float8Gemm::of)
    }

    /// Returns the kind of the kernel's matmuls.
    #[must_use]
    pub fn gemm_kind(&self) -> GemmKind {
        match self.float8_gemm() {
            None => GemmKind::of(self.dtype),
            float8 => GemmKind {
                dtype: self.dtype.rated(),
                float8,
            },
        }
    }

    /// Returns the element type of weight gradients of experts, of which a launch writes this many
    /// bytes; `None` if the kernel computes none. See Note [Stored gradients].
    #[must_use]
    pub fn weight_gradient_of_experts(&self, written: Bytes) -> Option<DType> {
        let KernelClass::GroupedGemm {
            n,
            k,
            experts,
            weight_gradient: true,
            ..
        } = self.class
        else {
            return None;
        };
        let wide = written.0 >= DType::F32.size() * experts * n * k;
        Some(match self.dtype.size() {
            _ if wide => DType::F32,
            1 => DType::Bf16,
            _ => self.dtype,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Words;

    #[test]
    fn names_are_those_of_recipes() {
        use crate::config::Float8Recipe;
        let recipes: Vec<&str> = Float8Recipe::ALL[1..].iter().map(|r| r.name()).collect();
        assert_eq!(recipes, ScaleMode::WORDS);
        let all = [
            ScaleMode::Tensorwise,
            ScaleMode::Rowwise,
            ScaleMode::Blockwise,
            ScaleMode::Mxfp8,
        ];
        assert_eq!(all.map(ScaleMode::name), ScaleMode::WORDS);
    }

    /// Programs of every recipe have matmuls of its own mode, with both kinds of accumulation if
    /// the recipe allows both.
    #[test]
    fn a_program_s_matmuls_have_the_mode_of_its_recipe() {
        for (mode, both) in [
            (ScaleMode::Tensorwise, true),
            (ScaleMode::Rowwise, true),
            (ScaleMode::Blockwise, false),
            (ScaleMode::Mxfp8, false),
        ] {
            let sets = [
                format!("precision.float8_recipe={}", mode.name()),
                "precision.float8_grad=e4m3".to_owned(),
                // Within 128 elements, blocks of a row are rows.
                "model.hidden=192".to_owned(),
                "model.ffn=256".to_owned(),
                "train.micro_batch=16".to_owned(),
            ];
            let scenario = crate::scenario::load("small-fp8".as_ref(), &sets).unwrap();
            let program = crate::plan(&scenario).unwrap();
            let found: std::collections::BTreeSet<Float8Gemm> = program
                .kernels
                .iter()
                .filter_map(Kernel::float8_gemm)
                .collect();
            let of = |fast_accum| Float8Gemm {
                scaling: mode,
                fast_accum,
            };
            let all = [false, true].into_iter().filter(|fast| both || !fast);
            assert_eq!(found, all.map(of).collect(), "{}", mode.name());
        }
    }
}
