//! Random delays change no bit, and expose a missing wait.

use super::*;
use crate::engine::DelaySpec;

fn delayed(seed: u64) -> ExecOptions {
    ExecOptions {
        delay: Some(DelaySpec {
            seed,
            probability: 0.3,
            max: Duration::from_micros(400),
        }),
        ..quick()
    }
}

fn run(toy: &Toy, options: ExecOptions) -> Vec<Vec<u32>> {
    let mut s = session(&toy.p, toy.weight, options);
    steps(&mut s, 3).unwrap();
    weights(&mut s, toy.weight)
        .into_iter()
        .map(|w| w.into_iter().map(f32::to_bits).collect())
        .collect()
}

#[test]
fn results_do_not_depend_on_timing() {
    for (pool, scope) in [(Pool::Caching, false), (Pool::Planned, true)] {
        let toy = toy(4, pool, scope);
        let calm = run(&toy, quick());
        for seed in 0..150 {
            assert_eq!(run(&toy, delayed(seed)), calm, "seed {seed}, {pool:?}");
        }
    }
}

#[test]
fn a_missing_wait_shows() {
    let mut toy = toy(4, Pool::Caching, false);
    let calm = run(&toy, quick());
    // Compute no longer waits for the gather.
    toy.p.instrs[toy.gathered.index()].op = Op::HostWork {
        kind: HostWorkKind::Hook,
        count: 0,
    };
    let caught = (0..40).any(|seed| run(&toy, delayed(seed)) != calm);
    assert!(
        caught,
        "forty disturbed runs without the wait agree with the program that has it"
    );
}

#[test]
fn a_short_queue_only_makes_the_host_wait() {
    let toy = toy(2, Pool::Caching, false);
    let calm = run(&toy, quick());
    let short = ExecOptions {
        queue_depth: 1,
        ..delayed(3)
    };
    assert_eq!(run(&toy, short), calm);
}
