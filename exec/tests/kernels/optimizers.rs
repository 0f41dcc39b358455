//! Compares with steps of optimizers computed by PyTorch (`optimizers.py`).

use super::memory::{Buffer, HYPER, kernel, launch_in};
use serde_json::Value;
use shardlab_exec::{Hyper, LaunchContext, ONE_GROUP, RawRange};
use shardlab_plan::config::GroupSettings;
use shardlab_plan::ir::{BodyOp, DType, Fused, OpKind, ShardOp};
use shardlab_plan::program::GroupRun;

fn reference() -> Value {
    serde_json::from_str(include_str!("optimizers.json")).unwrap()
}

fn numbers(of: &Value) -> Vec<f64> {
    let list = of.as_array().unwrap();
    list.iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Runs the reference's steps on weights and states, which are followed by their scales.
fn steps(
    op: ShardOp,
    groups: (&[GroupRun], Hyper),
    weights: &mut Buffer,
    states: &mut [Buffer],
    grads: &Value,
) {
    let (runs, hyper) = groups;
    let body = BodyOp {
        op: OpKind::Shard(op),
        inputs: Default::default(),
        outputs: Default::default(),
    };
    let kernel = kernel(vec![body]);
    for (step, grad) in (1..).zip(grads.as_array().unwrap()) {
        let mut grad = Buffer::of(DType::F32, &numbers(grad));
        let states: Vec<RawRange> = states.iter_mut().map(Buffer::range).collect();
        let ctx = LaunchContext {
            kernel: &kernel,
            data_rank: 0,
            hyper: Hyper { step, ..hyper },
            shapes: &[],
            groups: runs,
            scales: &[],
        };
        let weight = weights.range();
        let reads = [&[weight, grad.range()][..], &states].concat();
        let writes = [&[weight][..], &states].concat();
        launch_in(&ctx, &reads, &writes).unwrap();
    }
}

/// Returns how many numbers differ by more than rounding.
fn differ(a: &[f64], b: &[f64]) -> usize {
    assert_eq!(a.len(), b.len());
    let far = |(a, b): &(&f64, &f64)| (*a - *b).abs() > 1e-5 * b.abs().max(1e-2);
    a.iter().zip(b).filter(far).count()
}

/// `torch.optim.AdamW` with two parameter groups whose boundary is within one launch's range.
#[test]
fn parameter_groups_follow_torch() {
    let all = reference();
    let mut weights = Buffer::of(DType::F32, &numbers(&all["weights"]));
    let zeros = || Buffer::of(DType::F32, &[0.0; 300]);
    let mut groups = ONE_GROUP;
    groups[0] = Some(GroupSettings {
        weight_decay: 0.0,
        lr_scale: 0.1,
    });
    let runs = [(0, 200), (1, 100)].map(|(group, numel)| GroupRun { group, numel });
    let op = ShardOp::AdamW(Fused {
        cast: false,
        pieces: None,
        maxima: false,
    });
    let hyper = Hyper { groups, ..HYPER };
    let mut states = [zeros(), zeros()];
    steps(op, (&runs, hyper), &mut weights, &mut states, &all["grads"]);
    assert_eq!(differ(&weights.values(), &numbers(&all["groups"])), 0);
}

/// 8-bit states, and the values of their codes. A number halfway between two codes may be rounded
/// to either, which affects a few weights.
#[test]
fn states_in_8_bits_follow_torchao() {
    let all = reference();
    let tables = ["signed", "unsigned"].map(|name| numbers(&all[name]));
    let (cast, pieces) = (false, None);
    let adamw = ShardOp::AdamW(Fused {
        cast,
        pieces,
        maxima: false,
    });
    let lion = ShardOp::Lion(Fused {
        cast,
        pieces,
        maxima: false,
    });
    for (name, op) in [("adamw_8bit", adamw), ("lion_8bit", lion)] {
        let count = op.update().unwrap().rule.states();
        let codes = || Buffer::new(DType::U8, 300);
        let scales = || Buffer::of(DType::F32, &[0.0; 2]);
        let mut states: Vec<Buffer> = (0..count).map(|_| codes()).collect();
        states.extend((0..count).map(|_| scales()));
        let mut weights = Buffer::of(DType::F32, &numbers(&all["weights"]));
        steps(op, (&[], HYPER), &mut weights, &mut states, &all["grads"]);
        let want = &all[name];
        assert!(differ(&weights.values(), &numbers(&want[0])) <= 3, "{name}");
        for n in 0..count {
            let scales = states[count + n].values();
            let codes = states[n].values();
            let read = codes.iter().enumerate();
            let read: Vec<f64> = read
                .map(|(i, code)| tables[n][*code as usize] * scales[i / 256])
                .collect();
            assert!(differ(&read, &numbers(&want[n + 1])) <= 3, "{name} {n}");
        }
    }
}
