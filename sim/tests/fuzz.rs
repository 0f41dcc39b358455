//! Inputs of the fuzz target, generated from a seed, so that every test run uses the same few
//! thousand. `fuzz/` searches further, guided by coverage.

#[path = "fuzz/pipeline.rs"]
mod pipeline;

use pipeline::Reached;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::BTreeMap;

const INPUTS: u64 = 3_000;

/// `SHARDLAB_FUZZ_INPUTS` sets the number of inputs, and `SHARDLAB_FUZZ_FROM` the first seed.
/// `SHARDLAB_FUZZ_SHOW` prints each input before it runs, to find one that does not terminate.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(default)
}

#[test]
fn seeded_inputs() {
    let from = setting("SHARDLAB_FUZZ_FROM", 0);
    let n = setting("SHARDLAB_FUZZ_INPUTS", INPUTS);
    let profiles = pipeline::profiles();
    let mut failed = Vec::new();
    let mut reached: BTreeMap<Reached, u64> = BTreeMap::new();
    for seed in from..from + n {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut data = vec![0u8; 16 + (rng.next_u32() % 112) as usize];
        rng.fill_bytes(&mut data);
        if std::env::var_os("SHARDLAB_FUZZ_SHOW").is_some() {
            println!("input {seed}: {:#?}", pipeline::choose(&data));
        }
        let result = std::panic::catch_unwind(|| pipeline::run(&data, &profiles));
        match result {
            Ok(r) => *reached.entry(r).or_default() += 1,
            Err(_) => {
                println!("input {seed}: {:#?}", pipeline::choose(&data));
                failed.push(seed);
            }
        }
    }
    println!("{reached:?}");
    assert!(failed.is_empty(), "{} inputs: {failed:?}", failed.len());
    // The inputs are only useful while enough of them reach the simulator.
    let all_the_way = reached.get(&Reached::Simulated).copied().unwrap_or(0);
    assert!(all_the_way * 8 > n, "{reached:?}");
}
