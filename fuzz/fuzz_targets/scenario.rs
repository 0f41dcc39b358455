//! Fuzzes the scenario parser, the planner, the checker and the simulator.
//!
//! `RUSTC_BOOTSTRAP=1 cargo fuzz run scenario -s none -- -max_len=192 -runs=1000000`
#![no_main]

#[path = "../../sim/tests/fuzz/pipeline.rs"]
mod pipeline;

use libfuzzer_sys::fuzz_target;
use shardlab_sim::Profile;
use std::sync::OnceLock;

static PROFILES: OnceLock<Vec<(&'static str, Profile)>> = OnceLock::new();

fuzz_target!(|data: &[u8]| {
    pipeline::run(data, PROFILES.get_or_init(pipeline::profiles));
});
