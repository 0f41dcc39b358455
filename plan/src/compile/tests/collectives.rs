//! Collectives of the model graph: derivatives across simulated ranks, in every way to compile.

use super::interp::{Inputs, Rng, losses_of_ranks, train, train_ranks};
use super::*;
use crate::compile::full;
use crate::models::build::Builder;
use crate::models::declare::{Declare, Layer, ROOT, Weights};
use crate::models::{Declared, Forward};

const RANKS: u32 = 2;
const MODES: [CompileMode; 4] = [
    CompileMode::Off,
    CompileMode::Blocks,
    CompileMode::Regions,
    CompileMode::Full,
];

/// Returns the stack of linear layers, divided among two ranks.
fn divided(layers: u32) -> Scenario {
    let mut s = tiny(Family::Linear);
    s.model.layers = layers;
    s.mesh.tp = RANKS;
    s
}

fn collectives(ops: &[TapeOp]) -> usize {
    let is = |op: &&TapeOp| matches!(op, TapeOp::Collective { .. });
    ops.iter().filter(is).count()
}

/// Returns a rank's slices of whole parameters.
fn slices(s: &Scenario, divided: &Tape, whole: &Inputs, rank: u32) -> Inputs {
    let mesh = s.device_mesh();
    let of = |(p, all): (&Param, &Vec<f64>)| -> Vec<f64> {
        let runs = p.full_ranges(&mesh, rank, 0..p.numel());
        let runs = runs
            .into_iter()
            .map(|(_, r)| r.start as usize..r.end as usize);
        runs.flat_map(|r| all[r].to_vec()).collect()
    };
    let pairs = divided.params.iter().zip(&whole.params);
    Inputs {
        params: pairs.map(of).collect(),
        consts: whole.consts.clone(),
    }
}

#[test]
fn divided_layers_compute_what_whole_ones_do() {
    for layers in [2, 3, 4, 8] {
        for mode in MODES {
            for recompute in [
                Recompute::None,
                Recompute::Full,
                Recompute::Selective,
                Recompute::Pointwise,
            ] {
                let mut s = divided(layers);
                s.compile.mode = mode;
                s.train.recompute = recompute;
                let mut alone = s.clone();
                alone.mesh.tp = 1;
                let (t, one) = (build(&s), build(&alone));
                super::liveness::check(&t);
                // One sum per pair of layers in forward; in backward one per pair except the first,
                // whose input is no activation.
                let pairs = layers as usize / 2;
                assert_eq!(collectives(&t.forward), pairs);
                assert_eq!(collectives(&t.eval), pairs);
                let again = match recompute {
                    Recompute::Full => collectives(&t.backward) - (pairs - 1),
                    _ => 0,
                };
                assert_eq!(collectives(&t.backward), pairs - 1 + again, "{recompute:?}");
                let whole = Inputs::new(&one, 0);
                let expected = train(&one, &whole);
                let mine: Vec<Inputs> = (0..RANKS).map(|r| slices(&s, &t, &whole, r)).collect();
                for eval in [false, true] {
                    for loss in losses_of_ranks(&t, &mine, eval) {
                        assert!(
                            (loss - expected.loss).abs() < 1e-12,
                            "{mode:?} {recompute:?}"
                        );
                    }
                }
                let grads = Inputs {
                    params: expected.grads,
                    consts: vec![],
                };
                for (rank, got) in (0..RANKS).zip(train_ranks(&t, &mine)) {
                    let want = slices(&s, &t, &grads, rank).params;
                    for ((p, got), want) in t.params.iter().zip(&got.grads).zip(&want) {
                        for (x, y) in got.iter().zip(want) {
                            let close = (x - y).abs() < 1e-12 * y.abs().max(1.0);
                            assert!(close, "{} on {rank}: {x} {y}", p.name);
                        }
                    }
                }
            }
        }
    }
}

/// Full recompute communicates again; selective recompute keeps what was received.
#[test]
fn recompute_decides_whether_a_collective_is_repeated() {
    let backward = |recompute| {
        let mut s = divided(4);
        s.train.recompute = recompute;
        collectives(&build(&s).backward)
    };
    assert_eq!(backward(Recompute::None), 1);
    assert_eq!(backward(Recompute::Selective), 1);
    // The last layer's own input is recomputed in its block, from what the block before received.
    assert!(backward(Recompute::Full) >= 2);
}

/// A layer, a collective, a layer, on ranks with separate weights and samples.
struct Exchange {
    layers: [Layer; 2],
    kind: CollectiveKind,
}

impl Forward for Exchange {
    fn forward(&self, b: &mut Builder<'_>) {
        let (rows, d) = (4, b.s.model.hidden);
        let x = b.input(&[rows, d]);
        let y = b.linear(self.layers[0], x);
        let y = b.within(self.layers[0].module(), |b| {
            let y = b.g.unary(OpKind::Relu, y);
            let rows = match self.kind {
                CollectiveKind::AllGather => rows * u64::from(RANKS),
                CollectiveKind::ReduceScatter => rows / u64::from(RANKS),
                _ => rows,
            };
            let collective = ModelCollective::new(self.kind, AxisId::TP);
            let z = b.g.collective(collective, y, &[rows, d]);
            b.g.unary(OpKind::Gelu, z)
        });
        let z = b.linear(self.layers[1], y);
        crate::models::mean_square(b, z);
    }
}

fn exchange(s: &Scenario, kind: CollectiveKind) -> Tape {
    let mut d = Declare::new(Weights::Uniform, None, s.device_mesh());
    let shape = [s.model.hidden, s.model.hidden];
    let layers = ["first", "second"].map(|n| d.linear(ROOT, (n, ""), shape, true));
    let code = Box::new(Exchange { layers, kind });
    let model = Declared::of(d.finish(), code);
    full(s, model, side_by_side(&|m| m == ROOT))
}

/// Gathers and scatters are each other's transpose, and an all-to-all is its own: the gradient of
/// the sum of all ranks' losses, by finite differences.
#[test]
fn gradients_go_back_through_gathers_scatters_and_exchanges() {
    for kind in [
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
    ] {
        for mode in MODES {
            let mut s = divided(2);
            s.compile.mode = mode;
            let t = exchange(&s, kind);
            super::liveness::check(&t);
            assert_eq!((collectives(&t.forward), collectives(&t.backward)), (1, 1));
            let mut rng = Rng(5);
            let inputs: Vec<Inputs> = (0..RANKS)
                .map(|_| {
                    let mut i = Inputs::new(&t, 0);
                    let all = i.params.iter_mut().chain(&mut i.consts).flatten();
                    all.for_each(|x| *x = rng.next());
                    i
                })
                .collect();
            let total = |i: &[Inputs]| losses_of_ranks(&t, i, false).iter().sum::<f64>();
            let got = train_ranks(&t, &inputs);
            let mut seen = 0.0f64;
            for (r, got) in got.iter().enumerate() {
                for (p, param) in t.params.iter().enumerate() {
                    for i in [0, param.numel() as usize / 2, param.numel() as usize - 1] {
                        let at = |h: f64| {
                            let mut moved = inputs.clone();
                            moved[r].params[p][i] += h;
                            total(&moved)
                        };
                        let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
                        let exact = got.grads[p][i];
                        seen = seen.max(exact.abs());
                        assert!(
                            (numeric - exact).abs() < 1e-6 * exact.abs().max(1e-2),
                            "{kind:?} {mode:?} rank {r} {}[{i}]: {numeric} {exact}",
                            param.name
                        );
                    }
                }
            }
            assert!(seen > 1e-3, "the loss depends on what is exchanged");
        }
    }
}

/// Returns how often the host does work of this kind.
fn host_work(ops: &[TapeOp], of: HostWorkKind) -> usize {
    let count = |op: &TapeOp| match *op {
        TapeOp::Host { kind, count } if kind == of => usize::from(count),
        _ => 0,
    };
    ops.iter().map(count).sum()
}

/// A functional collective takes as many framework calls as were measured, in addition to one of
/// every other op.
#[test]
fn functional_collectives_take_many_framework_calls() {
    let mut whole = tiny(Family::Linear);
    whole.model.layers = 4;
    let (whole, divided) = (build(&whole), build(&divided(4)));
    let dispatched = |t: &Tape| {
        [
            host_work(&t.forward, HostWorkKind::Dispatch),
            host_work(&t.backward, HostWorkKind::AutogradDispatch),
        ]
    };
    let sent = [&divided.forward, &divided.backward].map(|ops| collectives(ops));
    assert!(sent[0] > 0 && sent[1] > 0, "{sent:?}");
    let more: Vec<usize> = std::iter::zip(dispatched(&divided), dispatched(&whole))
        .map(|(divided, whole)| divided - whole)
        .collect();
    assert!(more[0] >= 60 * sent[0], "{more:?} of {sent:?}");
    assert!(more[1] >= 25 * sent[1], "{more:?} of {sent:?}");
}

/// Inductor's Python runs around every kernel of compiled code, and nowhere else: autograd itself
/// fills the initial gradient.
#[test]
fn compiled_kernels_take_host_time() {
    for family in FAMILIES {
        for mode in MODES {
            let mut s = tiny(family);
            s.compile.mode = mode;
            let t = build(&s);
            for ops in [&t.forward, &t.backward] {
                let kernels = ops.iter().filter(|op| matches!(op, TapeOp::Launch { .. }));
                let (kernels, work) = (
                    kernels.count(),
                    host_work(ops, HostWorkKind::CompiledKernel),
                );
                match mode {
                    CompileMode::Off => assert_eq!(work, 0, "{family:?}"),
                    CompileMode::Full => assert!(kernels - work <= 1, "{family:?}"),
                    _ => assert!(work <= kernels, "{family:?} {mode:?}"),
                }
            }
        }
    }
}
