//! Routers and experts compared with float64: scoring functions, groups, biases, experts without
//! rows, and rows without an expert.

use super::case::{Arg, Case, arg};
use super::memory::{Buffer, HYPER, Rng, kernel, launch};
use shardlab_exec::RawRange;
use shardlab_exec::kernels::{KernelError, OperandError};
use shardlab_plan::ir::{
    BodyOp, DType, DrawnColumns, ForcedChoice, Indexing, OpKind, Place, Real, RowLimit, Slot,
    UsedRows, op,
};

const WEIGHT_GRAD: OpKind =
    OpKind::GroupedGemmWeightGrad(op::GroupedGemmWeightGrad { routed: None });
const FLOATS: [DType; 2] = [DType::F32, DType::Bf16];

fn route(sigmoid: bool, normalize: bool, groups: u64, kept: u64, bias: bool) -> op::Route {
    op::Route {
        k: 3,
        sigmoid,
        normalize,
        scale: Real(2.5),
        groups,
        kept,
        bias,
        forced: None,
    }
}

fn ids(shape: &[u64], values: &[i64]) -> Arg {
    let values: Vec<f64> = values.iter().map(|&v| v as f64).collect();
    arg(shape, DType::I64).ids(u64::MAX).values(&values)
}

#[test]
fn routers_of_every_kind() {
    let mut rng = Rng(3);
    for sigmoid in [false, true] {
        for normalize in [false, true] {
            for (groups, kept, bias) in [(1, 1, false), (1, 1, true), (4, 2, false), (4, 2, true)] {
                let of = route(sigmoid, normalize, groups, kept, bias);
                let logits = arg(&[9, 12], DType::F32);
                let mut inputs = vec![logits];
                inputs.extend(bias.then(|| arg(&[12], DType::F32)));
                let outputs = [arg(&[9, 3], DType::F32), arg(&[9, 3], DType::I64)];
                Case::new(OpKind::Route(of), &inputs, &outputs, &mut rng).check();
                let chosen: Vec<i64> = (0..9)
                    .flat_map(|r| [r % 12, (r + 5) % 12, (r + 2) % 12])
                    .collect();
                let grad = OpKind::RouteGrad(op::RouteGrad {
                    sigmoid,
                    normalize,
                    scale: Real(2.5),
                });
                let inputs = [
                    arg(&[9, 3], DType::F32),
                    arg(&[9, 12], DType::F32),
                    ids(&[9, 3], &chosen),
                ];
                Case::new(grad, &inputs, &[arg(&[9, 12], DType::F32)], &mut rng).check();
            }
        }
    }
}

/// Forced choices ignore scores and groups; weights are scores.
#[test]
fn forced_choices_are_weighted_by_scores() {
    let mut rng = Rng(8);
    let drawn = |popularity: &[f64]| ForcedChoice::Drawn(DrawnColumns::new(popularity, 3, 21));
    let falling: [f64; 12] = std::array::from_fn(|i| 0.8f64.powi(i as i32));
    for forced in [drawn(&[1.0; 12]), drawn(&falling), ForcedChoice::RoundRobin] {
        let forced = Some(forced);
        for (sigmoid, normalize, groups, bias) in [
            (false, true, 1, false),
            (true, true, 4, true),
            (true, false, 1, false),
        ] {
            let of = op::Route {
                forced,
                ..route(sigmoid, normalize, groups, 1, bias)
            };
            let mut inputs = vec![arg(&[70, 12], DType::F32)];
            inputs.extend(bias.then(|| arg(&[12], DType::F32)));
            let outputs = [arg(&[70, 3], DType::F32), arg(&[70, 3], DType::I64)];
            Case::new(OpKind::Route(of), &inputs, &outputs, &mut rng).check();
        }
    }
    // Choices for another number of experts.
    let of = op::Route {
        forced: Some(drawn(&[1.0; 8])),
        ..route(false, true, 1, 1, false)
    };
    let outputs = [arg(&[4, 3], DType::F32), arg(&[4, 3], DType::I64)];
    let logits = arg(&[4, 12], DType::F32);
    let failed = Case::new(OpKind::Route(of), &[logits], &outputs, &mut rng).run();
    assert!(failed.is_err());
}

#[test]
fn choices_of_each_expert_are_counted() {
    let chosen = [0, 3, 3, 11, 11, 11];
    let out = [arg(&[12], DType::F32)];
    let mut case = Case::new(
        OpKind::CountExperts,
        &[ids(&[3, 2], &chosen)],
        &out,
        &mut Rng(7),
    );
    case.run().unwrap();
    let mut wanted = [0.0; 12];
    (wanted[0], wanted[3], wanted[11]) = (1.0, 2.0, 3.0);
    assert_eq!(case.buffers()[0].values(), wanted);
    for bad in [-1, 12] {
        let inputs = [ids(&[1, 2], &[0, bad])];
        let failed = Case::new(OpKind::CountExperts, &inputs, &out, &mut Rng(7)).run();
        assert!(failed.is_err(), "{bad}");
    }
}

/// Groups that are not selected lose even if the scores of all others are negative. (With a mask of
/// zeros, they would win.)
#[test]
fn negative_scores_do_not_let_other_groups_win() {
    let of = op::Route {
        k: 2,
        ..route(true, true, 2, 1, true)
    };
    let logits = arg(&[1, 4], DType::F32).values(&[0.0, 0.1, 3.0, -9.0]);
    // The first group has the larger sum of its top two scores.
    let bias = arg(&[4], DType::F32).values(&[-2.0, -2.0, -4.5, -2.0]);
    let outputs = [arg(&[1, 2], DType::F32), arg(&[1, 2], DType::I64)];
    let mut rng = Rng(4);
    let mut case = Case::new(OpKind::Route(of), &[logits, bias], &outputs, &mut rng);
    case.run().unwrap();
    let chosen = case.buffers()[1].values();
    assert_eq!(chosen, [1.0, 0.0]);
}

#[test]
fn equal_scores_go_to_the_first_experts() {
    let of = route(false, true, 1, 1, false);
    let logits = arg(&[1, 5], DType::F32).values(&[0.5; 5]);
    let outputs = [arg(&[1, 3], DType::F32), arg(&[1, 3], DType::I64)];
    let mut case = Case::new(OpKind::Route(of), &[logits], &outputs, &mut Rng(5));
    case.run().unwrap();
    assert_eq!(case.buffers()[1].values(), [0.0, 1.0, 2.0]);
}

#[test]
fn losses_of_sequences_and_of_sigmoids() {
    let mut rng = Rng(6);
    for (sequences, sigmoid) in [(1, false), (1, true), (3, false), (3, true)] {
        let scale = Real(0.7);
        let loss = OpKind::LoadBalance(op::LoadBalance {
            k: 2,
            sequences,
            sigmoid,
            scale,
        });
        let logits = arg(&[12, 5], DType::F32);
        let outputs = [arg(&[], DType::F32), arg(&[sequences, 5], DType::F32)];
        Case::new(loss, std::slice::from_ref(&logits), &outputs, &mut rng).check();
        let grad = OpKind::LoadBalanceGrad(op::LoadBalanceGrad { sigmoid, scale });
        let inputs = [
            arg(&[], DType::F32),
            logits,
            arg(&[sequences, 5], DType::F32),
        ];
        Case::new(grad, &inputs, &[arg(&[12, 5], DType::F32)], &mut rng).check();
    }
}

/// Offsets of four experts over at most 9 rows. The first and the last expert have none.
const OFFSETS: [i64; 5] = [0, 0, 5, 7, 7];

#[test]
fn experts_without_rows_and_rows_without_an_expert() {
    let mut rng = Rng(7);
    for dtype in FLOATS {
        for tb in [false, true] {
            let b = if tb { [4, 6, 3] } else { [4, 3, 6] };
            let product = OpKind::GroupedGemm(op::GroupedGemm { tb, routed: None });
            // Every row has an expert.
            let whole = [arg(&[7, 3], dtype), arg(&b, dtype), ids(&[5], &OFFSETS)];
            Case::new(product, &whole, &[arg(&[7, 6], dtype)], &mut rng).check();
            // Two rows do not: their content is neither read nor overwritten.
            let mut tail = vec![1.0; 27];
            tail[21..].fill(f64::NAN);
            let more = [
                arg(&[9, 3], dtype).values(&tail),
                arg(&b, dtype),
                ids(&[5], &OFFSETS),
            ];
            let mut case = Case::new(product, &more, &[arg(&[9, 6], dtype)], &mut rng);
            let before = case.buffers()[0].values();
            case.run().unwrap();
            let after = case.buffers()[0].values();
            assert!(after[..42].iter().all(|v| v.is_finite()));
            assert_eq!(bits(&after[42..]), bits(&before[42..]));
        }
        let factors = [
            arg(&[7, 4], dtype),
            arg(&[7, 3], dtype),
            ids(&[5], &OFFSETS),
        ];
        let weights = [arg(&[4, 4, 3], dtype)];
        Case::new(WEIGHT_GRAD, &factors, &weights, &mut rng).check();
        let mut tail = vec![1.0; 36];
        tail[28..].fill(f64::NAN);
        let more = [
            arg(&[9, 4], dtype).values(&tail),
            arg(&[9, 3], dtype),
            ids(&[5], &OFFSETS),
        ];
        let mut case = Case::new(WEIGHT_GRAD, &more, &weights, &mut rng);
        case.run().unwrap();
        let made = case.buffers()[0].values();
        assert!(made.iter().all(|v| v.is_finite()));
        assert!(made[..12].iter().chain(&made[36..]).all(|v| *v == 0.0));
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_rank_without_any_row() {
    let mut rng = Rng(8);
    let none = ids(&[3, 2], &[-1, 7, 4, 9, -3, 8]);
    let sort = OpKind::SortExperts(op::SortExperts {
        experts: 4,
        limit: None,
    });
    let outputs = [arg(&[5], DType::I64), arg(&[3, 2], DType::I64)];
    Case::new(sort, &[none], &outputs, &mut rng).check();
    let nowhere = ids(&[3, 2], &[-1; 6]);
    let rows = arg(&[4, 5], DType::F32);
    Case::new(
        OpKind::Unpermute(op::Unpermute {
            by: Indexing::Own,
            routed: None,
        }),
        &[rows, nowhere],
        &[arg(&[3, 5], DType::F32)],
        &mut rng,
    )
    .check();
}

#[test]
fn offsets_and_positions_outside_of_the_rows_are_errors() {
    let slot = |place, shape: &[u64], dtype| Slot {
        place,
        offset: 0,
        shape: shape.into(),
        strides: Default::default(),
        dtype,
    };
    let run = |offsets: &[f64]| -> Result<(), KernelError> {
        let body = BodyOp {
            op: OpKind::GroupedGemm(op::GroupedGemm {
                tb: true,
                routed: None,
            }),
            inputs: [
                slot(Place::Read(0), &[4, 2], DType::F32),
                slot(Place::Read(1), &[2, 3, 2], DType::F32),
                slot(Place::Read(2), &[3], DType::I64),
            ]
            .into_iter()
            .collect(),
            outputs: [slot(Place::Write(0), &[4, 3], DType::F32)]
                .into_iter()
                .collect(),
        };
        let mut reads = [
            Buffer::new(DType::F32, 8),
            Buffer::new(DType::F32, 12),
            Buffer::new(DType::I64, 3),
        ];
        reads[2].write(0, offsets);
        let mut out = Buffer::new(DType::F32, 12);
        let reads: Vec<RawRange> = reads.iter_mut().map(Buffer::range).collect();
        launch(
            &kernel(vec![body]),
            super::memory::HYPER,
            &[],
            &reads,
            &[out.range()],
        )
    };
    assert!(run(&[0.0, 2.0, 4.0]).is_ok());
    for offsets in [[0.0, 2.0, 5.0], [0.0, 3.0, 2.0], [1.0, 2.0, 4.0]] {
        let fault = run(&offsets).unwrap_err().fault;
        assert!(matches!(fault, OperandError::Shape(_)), "{fault}");
    }
}

/// A kernel that computes the rows of experts does not write other rows.
#[test]
fn rows_without_an_expert_stay_as_they_were() {
    let slot = |place, shape: &[u64], dtype| Slot {
        place,
        offset: 0,
        shape: shape.into(),
        strides: Default::default(),
        dtype,
    };
    let op = |op, inputs: &[Slot], output: Slot| BodyOp {
        op,
        inputs: inputs.iter().cloned().collect(),
        outputs: [output].into_iter().collect(),
    };
    let (rows, cols, used) = (700, 96, 411);
    let x = slot(Place::Read(0), &[rows, cols], DType::Bf16);
    let y = slot(Place::Write(0), &[rows, cols], DType::Bf16);
    let silu = op(OpKind::Silu, &[x], y.clone());
    let amax = op(
        OpKind::RowAmax,
        &[y],
        slot(Place::Write(1), &[rows, 1], DType::F32),
    );
    let numel = (rows * cols) as usize;
    let mut rng = Rng(11);
    let numbers: Vec<f64> = (0..numel).map(|_| rng.next()).collect();
    for body in [vec![silu.clone()], vec![silu, amax]] {
        let launched = |end: Option<u64>| {
            let mut x = Buffer::of(DType::Bf16, &numbers);
            let mut offsets = Buffer::of(DType::I64, &[0.0, 100.0, end.unwrap_or(0) as f64]);
            let mut y = Buffer::of(DType::Bf16, &vec![9.0; numel]);
            let mut maxima = Buffer::of(DType::F32, &vec![9.0; rows as usize]);
            let mut kernel = kernel(body.clone());
            kernel.used_rows = end.map(|_| UsedRows {
                offsets: slot(Place::Read(1), &[3], DType::I64),
                reserved: rows,
                expected: rows / 2,
            });
            let reads = [x.range(), offsets.range()];
            launch(&kernel, HYPER, &[], &reads, &[y.range(), maxima.range()])?;
            Ok::<_, KernelError>([y.values(), maxima.values()])
        };
        let [all, all_maxima] = launched(None).unwrap();
        let [some, maxima] = launched(Some(used)).unwrap();
        let (used, end) = (used as usize, (used * cols) as usize);
        assert_eq!(some[..end], all[..end]);
        assert!(some[end..].iter().all(|v| *v == 9.0));
        if body.len() > 1 {
            assert_eq!(maxima[..used], all_maxima[..used]);
            assert!(maxima[used..].iter().all(|v| *v == 9.0));
        }
        let text = launched(Some(rows + 1)).unwrap_err().to_string();
        assert!(text.contains("of 700"), "{text}");
    }
}

/// Choices of six tokens. Nine of them fall on the three experts of this rank.
const CHOICES: [i64; 12] = [0, 2, -1, 1, 2, 0, 5, 2, 1, 0, -2, 1];

/// Sorts these choices into six rows. A balanced load would need five.
fn sort_into_six(drop: bool) -> Case {
    let limit = Some(RowLimit {
        rows: 6,
        balanced: 5,
        drop,
    });
    let sort = OpKind::SortExperts(op::SortExperts { experts: 3, limit });
    let outputs = [arg(&[4], DType::I64), arg(&[6, 2], DType::I64)];
    Case::new(sort, &[ids(&[6, 2], &CHOICES)], &outputs, &mut Rng(2))
}

/// Returns the result of an operation on these values.
fn made(op: OpKind, inputs: &[Arg], shape: &[u64]) -> Vec<f64> {
    let mut case = Case::new(op, inputs, &[arg(shape, DType::F32)], &mut Rng(1));
    case.run().unwrap();
    case.buffers()[0].values()
}

/// Returns small integers, whose sums are exact.
fn numbers(shape: &[u64], seed: u64) -> (Arg, Vec<f64>) {
    let n: u64 = shape.iter().product();
    let all: Vec<f64> = (0..n).map(|i| ((i * 7 + seed) % 11) as f64 - 5.0).collect();
    (arg(shape, DType::F32).values(&all), all)
}

/// Choices take rows in the order of tokens. A choice without a row adds nothing to its token or to
/// gradients, as in a loop over tokens.
#[test]
fn choices_beyond_the_limit_add_nothing() {
    sort_into_six(true).check();
    let mut sort = sort_into_six(true);
    sort.run().unwrap();
    let [offsets, position] = [0, 1].map(|n| sort.buffers()[n].values());
    // The first six choices on this rank are of experts 0, 2, 1, 2, 0, 2.
    assert_eq!(offsets, [0.0, 2.0, 3.0, 6.0]);
    let wanted = [0, 3, -1, 2, 4, 1, -1, 5, -1, -1, -1, -1].map(f64::from);
    assert_eq!(position, wanted);

    let as_ids = |shape: &[u64], values: &[f64]| {
        let values: Vec<i64> = values.iter().map(|v| *v as i64).collect();
        ids(shape, &values)
    };
    let at = || as_ids(&[6, 2], &position);
    let rows_of = || as_ids(&[4], &offsets);
    let (own, product) = (Indexing::Own, |tb| {
        OpKind::GroupedGemm(op::GroupedGemm { tb, routed: None })
    });
    let permute = OpKind::Permute(op::Permute {
        by: own,
        routed: None,
    });
    let unpermute = OpKind::Unpermute(op::Unpermute {
        by: own,
        routed: None,
    });
    let ((x, x_is), (w, w_is), (dy, dy_is)) = (
        numbers(&[6, 3], 1),
        numbers(&[3, 4, 3], 2),
        numbers(&[6, 4], 3),
    );
    let of = |shape: &[u64], values: &[f64]| arg(shape, DType::F32).values(values);
    let rows = made(permute, &[x, at()], &[6, 3]);
    let out = made(
        product(true),
        &[of(&[6, 3], &rows), w.clone(), rows_of()],
        &[6, 4],
    );
    let y = made(unpermute, &[of(&[6, 4], &out), at()], &[6, 4]);
    let d_out = made(permute, &[dy, at()], &[6, 4]);
    let d_rows = made(
        product(false),
        &[of(&[6, 4], &d_out), w, rows_of()],
        &[6, 3],
    );
    let dx = made(unpermute, &[of(&[6, 3], &d_rows), at()], &[6, 3]);
    let factors = [of(&[6, 4], &d_out), of(&[6, 3], &rows), rows_of()];
    let dw = made(WEIGHT_GRAD, &factors, &[3, 4, 3]);

    let (mut wanted_y, mut wanted_dx, mut wanted_dw) =
        (vec![0.0; 24], vec![0.0; 18], vec![0.0; 36]);
    let mut taken = 0;
    for (i, id) in CHOICES.into_iter().enumerate() {
        let Some(e) = usize::try_from(id).ok().filter(|e| *e < 3 && taken < 6) else {
            continue;
        };
        taken += 1;
        let t = i / 2;
        for r in 0..4 {
            for c in 0..3 {
                let at = e * 12 + r * 3 + c;
                wanted_y[t * 4 + r] += w_is[at] * x_is[t * 3 + c];
                wanted_dx[t * 3 + c] += w_is[at] * dy_is[t * 4 + r];
                wanted_dw[at] += dy_is[t * 4 + r] * x_is[t * 3 + c];
            }
        }
    }
    assert_eq!((y, dx, dw), (wanted_y, wanted_dx, wanted_dw));
}

#[test]
fn more_choices_than_rows_are_an_error() {
    let text = sort_into_six(false).run().unwrap_err().to_string();
    let wanted = "9 choices fall on the experts of one rank, which reserves 6 rows for them: set \
                  moe.capacity_factor = 1.80 or more, or moe.on_overflow = \"drop\"";
    assert!(text.contains(wanted), "{text}");
}
