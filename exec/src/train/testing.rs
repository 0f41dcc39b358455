//! Small scenarios for this crate's tests.

use shardlab_plan::{Program, Scenario, scenario};

/// A llama and a gpt2 of odd sizes, in float32 on two ranks.
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
