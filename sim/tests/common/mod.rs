//! A machine for which tests choose all durations.

#![allow(unreachable_pub, dead_code)]

use shardlab_plan::ir::{
    CollectiveId, CollectiveKind, CommId, DType, KernelClass, KernelId, StreamId,
};
use shardlab_plan::program::{Op, Program};
use shardlab_plan::record::Run;
use shardlab_sim::hardware::{self, CollectiveName, CollectiveTable, GemmRow, GemmTable};
use shardlab_sim::synthetic::Builder;
use shardlab_sim::{Options, Profile, simulate};

/// A builder whose kernels and collectives take whole microseconds with [`Machine::profile`].
pub struct Machine {
    pub b: Builder,
    kernels: Vec<u64>,
    gathers: Vec<u64>,
    reductions: Vec<u64>,
    ranks: u32,
}

impl Machine {
    pub fn new(ranks: u32) -> Self {
        Self {
            b: Builder::new("test", ranks),
            kernels: Vec::new(),
            gathers: Vec::new(),
            reductions: Vec::new(),
            ranks,
        }
    }

    /// Adds a kernel of `us` microseconds (a GEMM that the profile has a row for).
    pub fn kernel(&mut self, us: u64) -> KernelId {
        self.kernels.push(us);
        let class = KernelClass::Gemm {
            m: us,
            n: 1,
            k: 1,
            batch: 1,
        };
        self.b.kernel("k", class, 0, 0, 0)
    }

    pub fn run(&mut self, us: u64, stream: StreamId) -> &mut Self {
        let k = self.kernel(us);
        self.b.launch(k, stream);
        self
    }

    /// Adds an all-gather of `us` microseconds.
    pub fn gather(&mut self, us: u64, comm: CommId) -> CollectiveId {
        self.gathers.push(us);
        self.b
            .collective(CollectiveKind::AllGather, comm, us * 1024)
    }

    pub fn collect(&mut self, us: u64, comm: CommId, stream: StreamId) -> &mut Self {
        let id = self.gather(us, comm);
        self.b.op(Op::Collective { id, stream });
        self
    }

    /// Adds a reduce-scatter of `us` microseconds.
    pub fn reduce(&mut self, us: u64, comm: CommId, stream: StreamId) -> &mut Self {
        self.reductions.push(us);
        let kind = CollectiveKind::ReduceScatter;
        let id = self.b.collective(kind, comm, us * 1024);
        self.b.op(Op::Collective { id, stream });
        self
    }

    /// Returns a profile without latencies, gaps or host costs, for which the durations are exact.
    pub fn profile(&self) -> Profile {
        let mut p = hardware::load("h200-nvlink").unwrap();
        p.scale = None;
        p.device.kernel_gap_us = 0.0;
        p.device.loaded_rate = 1.0;
        p.device.graph_gap_us = 0.0;
        p.device.launch_latency_us = 0.0;
        p.device.min_kernel_us = 0.000_001;
        let h = &mut p.host;
        for cost in [
            &mut h.launch_us,
            &mut h.collective_us,
            &mut h.copy_us,
            &mut h.event_us,
            &mut h.host_wait_us,
            &mut h.alloc_us,
            &mut h.device_alloc_us,
            &mut h.graph_launch_us,
        ] {
            *cost = 0.0;
        }
        let mut rows: Vec<u64> = self.kernels.clone();
        rows.sort_unstable();
        rows.dedup();
        let rows = rows
            .iter()
            .map(|&us| GemmRow(us, 1, 1, us as f64))
            .collect();
        p.gemm = vec![GemmTable {
            source: "test".into(),
            dtype: DType::Bf16,
            scaling: None,
            fast_accum: None,
            rows,
        }];
        let table = |kind, of: &[u64]| {
            let mut rows = of.to_vec();
            rows.sort_unstable();
            rows.dedup();
            CollectiveTable {
                source: "test".into(),
                kind,
                ranks: self.ranks,
                nodes: 1,
                dtype: None,
                rows: rows.iter().map(|&us| (us * 1024, us as f64)).collect(),
                nccl_rows: Vec::new(),
            }
        };
        p.collective = vec![
            table(CollectiveName::AllGather, &self.gathers),
            table(CollectiveName::ReduceScatter, &self.reductions),
        ];
        p
    }

    pub fn program(&self) -> Program {
        self.b.clone().finish()
    }

    /// Simulates without contention. Each step starts on an idle device: at its end, the host waits
    /// for every stream.
    pub fn isolated(&self, profile: &Profile) -> Run {
        let mut b = self.b.clone();
        let streams = b.clone().finish().streams.len() as u8;
        for s in 0..streams {
            let event = b.add_event();
            b.op(Op::Record {
                event,
                stream: StreamId(s),
            })
            .op(Op::HostWait(event));
        }
        simulate(&b.finish(), profile, &quiet()).unwrap()
    }

    /// Simulates without contention.
    pub fn simulate(&self, profile: &Profile) -> Run {
        simulate(&self.program(), profile, &quiet()).unwrap()
    }
}

/// Returns options for two steady passes without contention.
pub fn quiet() -> Options {
    Options {
        steps: 2,
        contention: false,
        ..Options::default()
    }
}

/// Returns the start and end of each span in microseconds, relative to the start of the recorded
/// step on the host.
pub fn times(run: &Run) -> Vec<(f64, f64)> {
    let zero = run.recorded_from.us();
    run.spans
        .iter()
        .map(|s| (s.start.us() - zero, s.end.us() - zero))
        .collect()
}

pub fn step_us(run: &Run) -> f64 {
    run.step_samples.last().unwrap().us()
}
