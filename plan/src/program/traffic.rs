//! The bytes that a launch actually moves.

use super::{Op, Program};
use crate::ir::Place;
use crate::units::Bytes;

/// Memory traffic of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read.
    pub read: Bytes,
    /// Bytes written.
    pub written: Bytes,
}

impl Traffic {
    /// Returns the bytes of both directions.
    #[must_use]
    pub fn moved(self) -> Bytes {
        self.read + self.written
    }
}

// Note [Stored gradients]
//
// `compile` describes kernels before `lower` decides how gradients are stored. A descriptor
// therefore counts a gradient in the type that the kernel computes in, while the buffer may be
// wider (`precision.main_grads`) or narrower (`precision.comm_grads`). The launch's byte ranges
// show the actual width. Code that needs bytes corrects for this: the price of a launch
// (`Program::traffic`), the bounds of an operand (`check/form.rs`), and kernels, which take the
// element type from the buffer.

impl Program {
    /// Returns the traffic of a launch; zero for instructions that do not launch a kernel.
    ///
    /// See Note [Stored gradients].
    #[must_use]
    pub fn traffic(&self, op: &Op) -> Traffic {
        let Op::Launch { kernel, .. } = *op else {
            return Traffic::default();
        };
        let kernel = &self.kernels[kernel.index()];
        let (mut read, mut written) = (kernel.read.0, kernel.written.0);
        for (w, to) in self.writes(op).iter().enumerate() {
            let place = Place::Write(w as u8);
            let mut outputs = kernel.body.iter().flat_map(|b| &b.outputs);
            // Gradients are stored without gaps; for other operands, the descriptor is correct.
            let Some(slot) = outputs.find(|s| s.place == place && s.strides.is_empty()) else {
                continue;
            };
            let counted = slot.shape.iter().product::<u64>() * slot.dtype.size();
            if counted == 0 || counted == to.bytes {
                continue;
            }
            // Only some rows of a table may be touched.
            let touched = kernel.written.0.min(counted);
            let real = (u128::from(touched) * u128::from(to.bytes) / u128::from(counted)) as u64;
            written = written - touched + real;
            // An operand that the kernel adds to is also read.
            if self.reads(op).contains(to) {
                read = read - touched.min(read) + real;
            }
        }
        Traffic {
            read: Bytes(read),
            written: Bytes(written),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::DType;
    use crate::plan;
    use crate::program::{Phase, SectionKind};
    use crate::scenario::parse;
    use std::collections::BTreeSet;

    const LINEAR: &str = "[model]\nfamily = \"linear\"\nlayers = 4\nhidden = 64\n\
        [train]\nmicro_batch = 16\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";
    const LLAMA: &str = "[model]\nfamily = \"llama\"\nlayers = 1\nhidden = 64\nheads = 4\nffn = 176\nvocab = 250\n\
        max_seq_len = 32\n[train]\nseq_len = 32\nmicro_batch = 2\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

    /// Returns the traffic of the backward launches whose only result is a whole buffer of this
    /// type.
    fn gradients(text: &str, grads: &str, kernel: &str, to: DType) -> BTreeSet<(u64, u64)> {
        let set = [
            "fsdp.policy=native".to_owned(),
            format!("precision.main_grads={grads}"),
        ];
        let p = plan(&parse("test", text, &set).unwrap()).unwrap();
        let steady = p.section(SectionKind::Steady).unwrap();
        let backward = p
            .section_instrs(steady)
            .iter()
            .filter(|i| i.phase == Phase::Backward);
        let full = |op: &Op| {
            let role = |a: &super::super::Access| p.buffers[a.buffer.index()].role;
            p.writes(op).iter().any(|a| {
                role(a) == super::super::Role::FullGrad && p.buffers[a.buffer.index()].dtype == to
            })
        };
        backward
            .filter(|i| match i.op {
                Op::Launch { kernel: k, .. } => p.kernels[k.index()].name == kernel && full(&i.op),
                _ => false,
            })
            .map(|i| p.traffic(&i.op))
            .map(|t| (t.read.0, t.written.0))
            .collect()
    }

    #[test]
    fn products_write_gradients_as_wide_as_they_lie() {
        // 16 rows of 64 numbers in bf16, twice; 64 x 64 gradients.
        let read = 2 * 16 * 64 * 2;
        assert_eq!(
            gradients(LINEAR, "f32", "mm", DType::F32),
            BTreeSet::from([(read, 64 * 64 * 4)])
        );
        assert_eq!(
            gradients(LINEAR, "bf16", "mm", DType::Bf16),
            BTreeSet::from([(read, 64 * 64 * 2)])
        );
    }

    #[test]
    fn an_embedding_s_gradient_touches_its_rows_in_both_directions() {
        // 64 tokens: gradients of 64 numbers in bf16, ids of 8 bytes, and the rows themselves,
        // which are added to.
        let (rows, ids) = (64 * 64, 64 * 8);
        for (grads, to, size) in [("f32", DType::F32, 4), ("bf16", DType::Bf16, 2)] {
            assert_eq!(
                gradients(LLAMA, grads, "embedding_backward", to),
                BTreeSet::from([(rows * 2 + ids + rows * size, rows * size)]),
                "{grads}"
            );
        }
    }
}
