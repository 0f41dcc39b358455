//! Small scenarios for this crate's tests.

use super::TrainError;
use super::state::StateIo;
use shardlab_plan::ir::BufferId;
use shardlab_plan::{Program, Scenario, scenario};
use std::collections::BTreeMap;
use std::ops::Range;

/// Small llama and gpt2 models of odd sizes, in float32 on two ranks.
pub(crate) const BASE: [&str; 2] = [
    "[model]\nfamily = \"llama\"\nlayers = 2\nhidden = 24\nheads = 4\nkv_heads = 2\nffn = 40\nvocab = 53\n\
     [train]\nseq_len = 7\nmicro_batch = 1\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n[precision]\ncompute = \"f32\"\n",
    "[model]\nfamily = \"gpt2\"\nlayers = 2\nhidden = 24\nheads = 4\nffn = 40\nvocab = 53\nmax_seq_len = 9\n\
     [train]\nseq_len = 7\nmicro_batch = 1\n[mesh]\nhardware = \"cpu\"\ndp_shard = 2\n[precision]\ncompute = \"f32\"\n",
];

pub(crate) fn scenario_of(text: &str, set: &[String]) -> Scenario {
    scenario::parse("test", text, set).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

pub(crate) fn plan_of(text: &str, set: &[String]) -> Program {
    shardlab_plan::plan(&scenario_of(text, set)).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

/// Persistent memory without an engine: zeroed buffers that can be written and read back.
pub(crate) struct Memory {
    sizes: Vec<u64>,
    world: u32,
    bytes: BTreeMap<(u32, BufferId), Vec<u8>>,
    /// Size of the largest write, in bytes.
    pub(crate) largest_write: usize,
}

impl Memory {
    pub(crate) fn new(program: &Program) -> Self {
        Self {
            sizes: program.buffers.iter().map(|b| b.bytes.0).collect(),
            world: program.meta.mesh.world(),
            bytes: BTreeMap::new(),
            largest_write: 0,
        }
    }
}

impl StateIo for Memory {
    fn local(&self) -> Range<u32> {
        0..self.world
    }

    fn read(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        bytes: u64,
    ) -> Result<Vec<u8>, TrainError> {
        let zeros = vec![0; self.sizes[buffer.index()] as usize];
        let all = self.bytes.get(&(rank, buffer)).unwrap_or(&zeros);
        Ok(all[offset as usize..(offset + bytes) as usize].to_vec())
    }

    fn write(
        &mut self,
        rank: u32,
        buffer: BufferId,
        offset: u64,
        data: &[u8],
    ) -> Result<(), TrainError> {
        self.largest_write = self.largest_write.max(data.len());
        let size = self.sizes[buffer.index()] as usize;
        let all = self
            .bytes
            .entry((rank, buffer))
            .or_insert_with(|| vec![0; size]);
        all[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn preset(&mut self, rank: u32, buffer: BufferId, data: Vec<u8>) -> Result<(), TrainError> {
        self.write(rank, buffer, 0, &data)
    }
}
