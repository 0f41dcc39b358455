//! Compares with steps of `torch.optim.Muon` computed by PyTorch (`muon.py`).

use super::memory::{Buffer, HYPER, Rng, kernel, launch};
use serde_json::Value;
use shardlab_exec::{Hyper, MuonSettings};
use shardlab_plan::config::MuonAdjustLr;
use shardlab_plan::ir::{BodyOp, DType, Kernel, MatrixShape, NewtonSchulz, OpKind, Shape, ShardOp};

fn numbers(of: &Value) -> Vec<f64> {
    let list = of.as_array().unwrap();
    list.iter().map(|x| x.as_f64().unwrap()).collect()
}

fn muon() -> ShardOp {
    ShardOp::Muon {
        cast: false,
        pieces: None,
        newton_schulz: NewtonSchulz {
            flops: 0,
            largest: [12, 20],
        },
    }
}

fn of(op: ShardOp) -> Kernel {
    kernel(vec![BodyOp {
        op: OpKind::Shard(op),
        inputs: Default::default(),
        outputs: Default::default(),
    }])
}

/// Runs the reference's steps on matrices with these shapes in one range. Returns the new weights
/// and momenta.
fn steps(all: &Value, shapes: &[Shape], adjust_lr: MuonAdjustLr) -> [Vec<f64>; 2] {
    let kernel = of(muon());
    let number = |key: &str| all[key].as_f64().unwrap();
    let hyper = Hyper {
        lr: number("lr"),
        weight_decay: number("weight_decay"),
        muon: MuonSettings {
            momentum: number("momentum"),
            adjust_lr,
        },
        ..HYPER
    };
    let mut weights = Buffer::of(DType::F32, &numbers(&all["weights"]));
    let mut momenta = Buffer::of(DType::F32, &vec![0.0; weights.values().len()]);
    for grad in all["grads"].as_array().unwrap() {
        let mut grad = Buffer::of(DType::F32, &numbers(grad));
        let reads = [weights.range(), grad.range(), momenta.range()];
        let writes = [weights.range(), momenta.range()];
        launch(&kernel, hyper, shapes, &reads, &writes).unwrap();
    }
    [weights.values(), momenta.values()]
}

fn reference() -> (Value, Vec<Shape>) {
    let all: Value = serde_json::from_str(include_str!("muon.json")).unwrap();
    let shape = |s: &Value| numbers(s).iter().map(|n| *n as u64).collect();
    let shapes = all["shapes"].as_array().unwrap().iter().map(shape);
    let shapes = shapes.collect();
    (all, shapes)
}

/// Wide, tall and square matrices, with both adjustments. Newton-Schulz computes in bfloat16, whose
/// rounding depends on the order of sums.
#[test]
fn matrices_follow_torch() {
    let (all, shapes) = reference();
    for (name, adjust) in [
        ("original", MuonAdjustLr::Original),
        ("match_rms_adamw", MuonAdjustLr::MatchRmsAdamw),
    ] {
        let [weights, momenta] = steps(&all, &shapes, adjust);
        let want = &all["runs"][name];
        let start = numbers(&all["weights"]);
        let far = |a: &[f64], b: &[f64]| {
            let squares = |x: f64, y: f64| (x - y) * (x - y);
            let apart: f64 = a.iter().zip(b).map(|(a, b)| squares(*a, *b)).sum();
            apart.sqrt()
        };
        // The error is relative to the distance that the weights have moved.
        let moved = far(&start, &numbers(&want[0]));
        let error = far(&weights, &numbers(&want[0])) / moved;
        assert!(error < 2e-3, "{name}: {error}");
        let states = numbers(&want[1]);
        let error = far(&momenta, &states) / far(&states, &vec![0.0; states.len()]);
        assert!(error < 1e-6, "{name}: {error}");
    }
}

/// A range that does not end with a matrix is rejected, and so is one without known shapes.
#[test]
fn parts_of_matrices_are_refused() {
    let (all, shapes) = reference();
    let kernel = of(muon());
    let values = numbers(&all["weights"]);
    for (numel, shapes) in [
        (values.len() - 1, &shapes[..]),
        (values.len(), &shapes[..2]),
    ] {
        let [mut weights, mut grads, mut momenta] =
            [0, 1, 2].map(|_| Buffer::of(DType::F32, &values[..numel]));
        let reads = [weights.range(), grads.range(), momenta.range()];
        let writes = [weights.range(), momenta.range()];
        let refused = launch(&kernel, HYPER, shapes, &reads, &writes).unwrap_err();
        assert!(refused.to_string().contains("the matrices"), "{refused}");
    }
}

/// Two ranks have four and three rows of a matrix, and a row of padding. Momentum,
/// orthogonalization and update one after another give the bits of the launch that has the whole
/// matrix.
#[test]
fn rows_are_updated_like_the_whole_matrix() {
    for (rows, cols) in [(7, 3), (7, 12)] {
        let (numel, shard) = (rows * cols, 4 * cols);
        let shape = Shape::from_slice(&[rows as u64, cols as u64]);
        let matrix = MatrixShape {
            rows: rows as u64,
            cols: cols as u64,
        };
        let mut rng = Rng(9);
        let mut random = || -> Vec<f64> {
            let values = (0..numel).map(|_| rng.next());
            values
                .chain(std::iter::repeat_n(0.0, 2 * shard - numel))
                .collect()
        };
        let [w, g, m] = [random(), random(), random()];
        let hyper = Hyper {
            lr: 0.02,
            weight_decay: 0.1,
            muon: MuonSettings {
                momentum: 0.95,
                adjust_lr: MuonAdjustLr::Original,
            },
            ..HYPER
        };
        let mut whole = [&w, &g, &m].map(|x| Buffer::of(DType::F32, &x[..numel]));
        let [a, b, c] = whole.each_mut().map(Buffer::range);
        launch(&of(muon()), hyper, &[shape], &[a, b, c], &[a, c]).unwrap();

        let mut ranks = [&w, &g, &m].map(|x| Buffer::of(DType::F32, x));
        let mut update = Buffer::new(DType::Bf16, 2 * shard);
        for rank in 0..2 {
            let part = |b: &mut Buffer| b.part(rank * shard, shard);
            let [a, b, c] = ranks.each_mut().map(part);
            let to = update.part(rank * shard, shard);
            let writes = [a, c, to];
            launch(&of(ShardOp::MuonMomentum), hyper, &[], &[a, b, c], &writes).unwrap();
        }
        let all = update.part(0, numel);
        let orthogonalize = of(ShardOp::Orthogonalize { matrix });
        launch(&orthogonalize, hyper, &[], &[all], &[all]).unwrap();
        for rank in 0..2 {
            let weight = ranks[0].part(rank * shard, shard);
            let rows = update.part(rank * shard, shard);
            let apply = of(ShardOp::MuonApply { matrix });
            launch(&apply, hyper, &[], &[weight, rows], &[weight]).unwrap();
        }
        for state in [0, 2] {
            let found = ranks[state].values();
            let (all, padding) = found.split_at(numel);
            assert_eq!(all, whole[state].values(), "{rows} x {cols}");
            assert!(padding.iter().all(|x| *x == 0.0));
        }
    }
}
