//! Derived numbers of a profile: the footprint of a process, FLOPs and their share of the peak.

use super::profile::Profile;
use shardlab_plan::ir::{CommId, DType};
use shardlab_plan::program::{Program, workspace};
use shardlab_plan::units::{Bytes, Picos};

/// Device memory of a process outside the allocator, by origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Context and libraries.
    pub context: Bytes,
    /// All communicators.
    pub communicators: Bytes,
    /// Kernels' workspaces.
    pub workspaces: Bytes,
}

impl MemoryUse {
    /// Returns the sum.
    #[must_use]
    pub fn total(self) -> Bytes {
        self.context + self.communicators + self.workspaces
    }
}

impl Profile {
    /// Returns the memory that a process can use on the device.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        Bytes(self.device.memory_mib << 20)
    }

    /// Returns the device memory outside the allocator while a program runs.
    #[must_use]
    pub fn outside_allocator(&self, program: &Program) -> MemoryUse {
        let f = &self.footprint;
        let each = |engines: bool| match f.copy_engine_communicator_mib {
            Some(mib) if engines => mib,
            _ => f.communicator_mib,
        };
        let used = program.used_communicators();
        let all = (0..).map(CommId).zip(&program.communicators);
        let made = all.filter_map(|(id, c)| match used.get(&id) {
            Some(engines) => Some(*engines),
            None => (!f.used_communicators).then_some(c.copy_engine),
        });
        let engines: Vec<bool> = made.collect();
        let once = [
            (!engines.is_empty(), f.joined_mib),
            (engines.contains(&false), f.collective_kernels_mib),
        ];
        let once: u64 = once.iter().filter(|o| o.0).map(|o| o.1).sum();
        let communicators = once + engines.into_iter().map(each).sum::<u64>();
        MemoryUse {
            context: Bytes(f.context_mib << 20),
            communicators: Bytes(communicators << 20),
            workspaces: if f.kernel_workspaces {
                workspace::of(program)
            } else {
                Bytes(0)
            },
        }
    }

    /// Returns the model FLOPs of a rank's step relative to what one device computes in that time
    /// at its dense peak: 0 to 1, and 0 if the time is zero.
    #[must_use]
    pub fn utilisation(&self, program: &Program, step: Picos) -> f64 {
        let most = step.secs() * self.peak_flops(program.meta.compute);
        if most > 0.0 {
            program.meta.model_flops.0 as f64 / most
        } else {
            0.0
        }
    }

    /// Returns the dense peak of an element type in FLOP/s, or that of float32 if the profile lacks
    /// the type.
    #[must_use]
    pub fn peak_flops(&self, dtype: DType) -> f64 {
        let tflops = self
            .device
            .tflops
            .get(&dtype)
            .or_else(|| self.device.tflops.get(&DType::F32));
        tflops.copied().unwrap_or(1.0) * 1e12
    }
}
