//! Collectives against naive reference implementations, mismatches, timeouts.

use super::*;
use crate::base::failure::{Failure, FailureKind};
use crate::base::operand::RawRange;
use crate::base::testing::Build;
use half::bf16;
use shardlab_plan::ir::{CollectiveKind, CountedRows, DType, PushedRows, ReduceOp, SelectedRows};
use smallvec::SmallVec;
use std::time::Duration;

const KINDS: [CollectiveKind; 4] = [
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllReduce,
    CollectiveKind::AllToAll,
];
const REDUCTIONS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(0.3)];

fn words(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes
            .chunks(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect(),
        DType::Bf16 => bytes
            .chunks(2)
            .map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32())
            .collect(),
        _ => unreachable!(),
    }
}

fn bytes(words: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => words.iter().flat_map(|w| w.to_le_bytes()).collect(),
        DType::Bf16 => words
            .iter()
            .flat_map(|w| bf16::from_f32(*w).to_le_bytes())
            .collect(),
        _ => unreachable!(),
    }
}

/// Returns numbers whose sums round differently in different orders.
fn numbers(rank: usize, n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| {
            let x = ((rank * 7919 + i * 104_729) % 1009) as f32 - 500.0;
            x * 10f32.powi((i % 5) as i32 - 2) / 3.0
        })
        .collect()
}

/// Returns the expected output of every member: a sum in rank order in float32, element by element.
fn reference(kind: CollectiveKind, op: ReduceOp, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let n = inputs.len();
    let factor = match op {
        ReduceOp::Avg => Some(1.0 / n as f32),
        ReduceOp::PremulSum(f) => Some(f as f32),
        _ => None,
    };
    let sum: Vec<f32> = (0..inputs[0].len())
        .map(|i| {
            let term = |x: f32| factor.map_or(x, |f| x * f);
            inputs[1..]
                .iter()
                .fold(term(inputs[0][i]), |a, x| a + term(x[i]))
        })
        .collect();
    let piece = inputs[0].len() / n;
    (0..n)
        .map(|r| match kind {
            CollectiveKind::AllGather => inputs.concat(),
            CollectiveKind::ReduceScatter => sum[r * piece..(r + 1) * piece].to_vec(),
            CollectiveKind::AllReduce => sum.clone(),
            CollectiveKind::AllToAll => inputs
                .iter()
                .flat_map(|x| x[r * piece..(r + 1) * piece].to_vec())
                .collect(),
            kind => unreachable!("{kind:?} has a test of its own"),
        })
        .collect()
}

fn range(data: &mut [u8], dtype: DType) -> RawRange {
    RawRange {
        ptr: data.as_mut_ptr(),
        bytes: data.len(),
        dtype,
    }
}

/// Runs one collective on threads that arrive in a shuffled order. Returns the outputs by member.
fn perform(
    kind: CollectiveKind,
    reduce: ReduceOp,
    dtype: DType,
    inputs: &[Vec<f32>],
    in_place: bool,
    scramble: u64,
) -> Vec<Vec<f32>> {
    let n = inputs.len();
    let abort = Arc::new(Abort::new(Duration::from_secs(20)));
    let group = Group::new("test", (0..n as u32).collect(), abort);
    let results: Vec<Vec<f32>> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..n)
            .map(|me| {
                let group = &group;
                let input = bytes(&inputs[me], dtype);
                s.spawn(move || {
                    let len = input.len();
                    let out = match kind {
                        CollectiveKind::AllGather => len * n,
                        CollectiveKind::ReduceScatter => len / n,
                        _ => len,
                    };
                    // Memory that is aligned for both forms.
                    let mut memory = vec![0f32; (len + out) / 4 + 2];
                    let raw: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
                    let base = raw.as_mut_ptr();
                    let (i, o) = match (in_place, kind) {
                        (false, _) => (0, len.next_multiple_of(4)),
                        (true, CollectiveKind::AllGather) => (me * len, 0),
                        (true, CollectiveKind::ReduceScatter) => (0, me * out),
                        (true, _) => (0, 0),
                    };
                    raw[i..i + len].copy_from_slice(&input);
                    let at = |offset: usize, bytes: usize| RawRange {
                        ptr: base.wrapping_add(offset),
                        bytes,
                        dtype,
                    };
                    let call = Call {
                        kind,
                        reduce,
                        dtype,
                        parts: SmallVec::from_elem((at(i, len), at(o, out)), 1),
                        rows: None,
                        crash: false,
                    };
                    let order = (me as u64 * 5 + scramble) % n as u64;
                    std::thread::sleep(Duration::from_micros(order * 300));
                    // SAFETY: the memory lives until the call has returned on every member (the
                    // scope), and belongs to this thread.
                    unsafe { group.run(me, 0, call) }.unwrap();
                    let done: &[u8] = bytemuck::cast_slice(&memory);
                    words(&done[o..o + out], dtype)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    results
}

#[test]
fn every_kind_equals_its_reference_in_every_world_and_form() {
    for n in [1usize, 2, 3, 4, 8] {
        for dtype in [DType::F32, DType::Bf16] {
            for kind in KINDS {
                let reduces = matches!(
                    kind,
                    CollectiveKind::ReduceScatter | CollectiveKind::AllReduce
                );
                let ops: &[ReduceOp] = if reduces {
                    &REDUCTIONS
                } else {
                    &[ReduceOp::None]
                };
                for &op in ops {
                    // An odd number of elements per chunk, and more than one block of the
                    // accumulator.
                    let len = n * 1031;
                    let inputs: Vec<Vec<f32>> = (0..n)
                        .map(|r| words(&bytes(&numbers(r, len), dtype), dtype))
                        .collect();
                    let wanted: Vec<Vec<f32>> = reference(kind, op, &inputs)
                        .iter()
                        .map(|w| words(&bytes(w, dtype), dtype))
                        .collect();
                    for in_place in [false, true] {
                        let got = perform(kind, op, dtype, &inputs, in_place, n as u64);
                        assert!(
                            got == wanted,
                            "{kind:?} {op:?} {dtype} over {n}, in place: {in_place}"
                        );
                    }
                }
            }
        }
    }
}

/// Two members push the rows of two tokens each: member 0 has expert 0, member 1 has expert 1.
/// Token 0 of member 0 chooses both experts, its token 1 chooses neither, and those of member 1
/// choose expert 0 and expert 1. Then the rows are returned.
#[test]
fn rows_are_pushed_to_the_members_that_choices_name_and_return() {
    const NOT: f32 = -7.0;
    // For each member, with the numbers that member 0 and member 1 give their experts.
    let sent: [Vec<i64>; 2] = [vec![0, -1, 0, 5], vec![0, 1, -1, 0]];
    let got: [Vec<i64>; 2] = [vec![0, -1, 0, 1], vec![0, 5, -1, 0]];
    let push = |kind, input: [Vec<f32>; 2], choices: &[Vec<i64>; 2]| -> Vec<Vec<f32>> {
        let abort = Arc::new(Abort::new(Duration::from_secs(20)));
        let group = Group::new("test", vec![0, 1], abort);
        std::thread::scope(|s| {
            let threads: Vec<_> = (0..2)
                .map(|me| {
                    let (group, mut input) = (&group, input[me].clone());
                    let mut choices = choices[me].clone();
                    s.spawn(move || {
                        let mut out = vec![NOT; 8];
                        let f = |v: &mut [f32]| range(bytemuck::cast_slice_mut(v), DType::F32);
                        let names = range(bytemuck::cast_slice_mut(&mut choices), DType::I64);
                        let parts = [(f(&mut input), f(&mut out)), (names, names)];
                        let call = Call {
                            kind,
                            reduce: ReduceOp::None,
                            dtype: DType::F32,
                            parts: parts.into_iter().collect(),
                            rows: Some(SelectedRows::Pushed(PushedRows {
                                experts: 1,
                                rows: 4,
                                expected: 4,
                                over_network: 0,
                            })),
                            crash: false,
                        };
                        // SAFETY: the memory belongs to this thread, and lives until the call has
                        // returned on every member.
                        unsafe { group.run(me, 0, call) }.unwrap();
                        out
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    };
    let tokens = [vec![1., 2., 3., 4.], vec![5., 6., 7., 8.]];
    let there = push(CollectiveKind::PeerPush, tokens, &sent);
    assert_eq!(there[0], [1., 2., NOT, NOT, 5., 6., NOT, NOT]);
    assert_eq!(there[1], [1., 2., NOT, NOT, NOT, NOT, 7., 8.]);
    let rows = [there[0].clone(), there[1].clone()];
    let back = push(CollectiveKind::PeerReturn, rows, &got);
    // Blocks of members 0 and 1.
    assert_eq!(back[0], [1., 2., NOT, NOT, 1., 2., NOT, NOT]);
    assert_eq!(back[1], [5., 6., NOT, NOT, NOT, NOT, 7., 8.]);
}

/// Member 0 sends two of three rows to itself and one to member 1, which sends three and none.
#[test]
fn counted_rows_are_exchanged_and_others_are_left_as_they_were() {
    const NOT: f32 = -7.0;
    let sent: [Vec<i64>; 2] = [vec![2, 0, 0, 1], vec![1, 4, 0, 0]];
    let inputs: [Vec<f32>; 2] = [
        vec![1., 2., 3., 4., 5., 6.],
        vec![11., 12., 13., 14., 15., 16.],
    ];
    let abort = Arc::new(Abort::new(Duration::from_secs(20)));
    let group = Group::new("test", vec![0, 1], abort);
    let exchange = |me: usize| {
        let (mut input, mut counts) = (inputs[me].clone(), sent[me].clone());
        let mut out = vec![NOT; 6];
        let f = |v: &mut [f32]| range(bytemuck::cast_slice_mut(v), DType::F32);
        let numbers = range(bytemuck::cast_slice_mut(&mut counts), DType::I64);
        let call = Call {
            kind: CollectiveKind::AllToAll,
            reduce: ReduceOp::None,
            dtype: DType::F32,
            parts: [(f(&mut input), f(&mut out)), (numbers, numbers)]
                .into_iter()
                .collect(),
            rows: Some(SelectedRows::Counted(CountedRows {
                rows: 6,
                expected: 4,
            })),
            crash: false,
        };
        // SAFETY: the memory belongs to this thread, and lives until the call has returned on every
        // member.
        unsafe { group.run(me, 0, call) }.unwrap();
        out
    };
    let got = std::thread::scope(|s| {
        let other = s.spawn(|| exchange(1));
        [exchange(0), other.join().unwrap()]
    });
    // A block has three rows, so two of the five rows that member 1 counts for member 0 stay.
    assert_eq!(got[0], [1., 2., NOT, 11., 12., 13.]);
    assert_eq!(got[1], [4., NOT, NOT, NOT, NOT, NOT]);
}

#[test]
fn the_order_of_arrival_does_not_show() {
    let inputs: Vec<Vec<f32>> = (0..4).map(|r| numbers(r, 4 * 257)).collect();
    let run = |scramble| {
        perform(
            CollectiveKind::AllReduce,
            ReduceOp::Avg,
            DType::F32,
            &inputs,
            true,
            scramble,
        )
    };
    let first = run(0);
    for scramble in 1..4 {
        assert_eq!(run(scramble), first);
    }
    // The order of ranks matters, because the addition of these numbers is not associative.
    let reversed: Vec<Vec<f32>> = inputs.iter().rev().cloned().collect();
    let other = perform(
        CollectiveKind::AllReduce,
        ReduceOp::Avg,
        DType::F32,
        &reversed,
        true,
        0,
    );
    assert_ne!(other, first);
}

#[test]
fn average_premultiplied_sum_and_scaling_before_a_sum_agree_bit_for_bit() {
    let inputs: Vec<Vec<f32>> = (0..3).map(|r| numbers(r, 300)).collect();
    let run = |op, inputs: &[Vec<f32>]| {
        perform(
            CollectiveKind::ReduceScatter,
            op,
            DType::F32,
            inputs,
            false,
            0,
        )
    };
    let scaled: Vec<Vec<f32>> = inputs
        .iter()
        .map(|v| v.iter().map(|x| x * (1.0f64 / 3.0) as f32).collect())
        .collect();
    let sum = run(ReduceOp::Sum, &scaled);
    assert_eq!(run(ReduceOp::Avg, &inputs), sum);
    assert_eq!(run(ReduceOp::PremulSum(1.0 / 3.0), &inputs), sum);
}

/// Calls a collective on four threads. Returns the results by member.
fn calls(
    timeout: Duration,
    members: u32,
    make: impl Fn(usize) -> Option<(u64, Call)> + Sync,
) -> Vec<Option<Result<Arrival, CommError>>> {
    let abort = Arc::new(Abort::new(timeout));
    let group = Group::new("shard", (10..10 + members).collect(), Arc::clone(&abort));
    std::thread::scope(|s| {
        let threads: Vec<_> = (0..members as usize)
            .map(|me| {
                let (group, make) = (&group, &make);
                s.spawn(move || {
                    let (ticket, call) = make(me)?;
                    // SAFETY: the test's ranges are never accessed (the calls do not match) or
                    // leaked.
                    Some(unsafe { group.run(me, ticket, call) })
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn leaked(kind: CollectiveKind, reduce: ReduceOp, dtype: DType, i: usize, o: usize) -> Call {
    let input = range(vec![0; i].leak(), dtype);
    let output = range(vec![0; o].leak(), dtype);
    Call {
        kind,
        reduce,
        dtype,
        parts: SmallVec::from_elem((input, output), 1),
        rows: None,
        crash: false,
    }
}

#[test]
fn mismatches_are_errors_on_every_rank() {
    let fine = || {
        leaked(
            CollectiveKind::AllGather,
            ReduceOp::None,
            DType::F32,
            64,
            256,
        )
    };
    type Odd = fn() -> Call;
    let odd: [(Odd, &str); 5] = [
        (
            || {
                leaked(
                    CollectiveKind::AllGather,
                    ReduceOp::None,
                    DType::F32,
                    32,
                    128,
                )
            },
            "launches all_gather of 128 bytes",
        ),
        (
            || leaked(CollectiveKind::AllReduce, ReduceOp::Sum, DType::F32, 64, 64),
            "launches all_reduce",
        ),
        (
            || {
                leaked(
                    CollectiveKind::AllGather,
                    ReduceOp::None,
                    DType::Bf16,
                    64,
                    256,
                )
            },
            "bf16",
        ),
        (
            || {
                leaked(
                    CollectiveKind::AllGather,
                    ReduceOp::None,
                    DType::F32,
                    64,
                    64,
                )
            },
            "64 bytes",
        ),
        (
            || {
                let mut c = leaked(
                    CollectiveKind::AllGather,
                    ReduceOp::None,
                    DType::F32,
                    64,
                    256,
                );
                c.parts.push(c.parts[0]);
                c
            },
            "2 parts",
        ),
    ];
    for (odd, text) in odd {
        let results = calls(Duration::from_secs(5), 4, |me| {
            Some((0, if me == 2 { odd() } else { fine() }))
        });
        for r in results {
            let Some(Err(CommError::Mismatch(m))) = r else {
                panic!("{r:?}");
            };
            assert!(m.contains("rank 12") && m.contains(text), "{m}");
        }
    }
}

#[test]
fn impossible_calls_are_errors_on_every_rank() {
    let overlap = || {
        let memory: &'static mut [u8] = vec![0; 256].leak();
        let (i, o) = (memory.as_mut_ptr(), memory.as_mut_ptr().wrapping_add(8));
        let at = |ptr, bytes| RawRange {
            ptr,
            bytes,
            dtype: DType::F32,
        };
        Call {
            kind: CollectiveKind::AllReduce,
            reduce: ReduceOp::Sum,
            dtype: DType::F32,
            parts: SmallVec::from_elem((at(i, 64), at(o, 64)), 1),
            rows: None,
            crash: false,
        }
    };
    let integers = || leaked(CollectiveKind::AllReduce, ReduceOp::Sum, DType::I64, 64, 64);
    let no_reduction = || {
        leaked(
            CollectiveKind::AllReduce,
            ReduceOp::None,
            DType::F32,
            64,
            64,
        )
    };
    let sizes = || {
        leaked(
            CollectiveKind::ReduceScatter,
            ReduceOp::Sum,
            DType::F32,
            64,
            64,
        )
    };
    type Make = fn() -> Call;
    let all: [(Make, &str); 4] = [
        (overlap, "other than in place"),
        (integers, "reduction of i64"),
        (no_reduction, "all_reduce None"),
        (sizes, "64 bytes in and 64 bytes out"),
    ];
    for (make, text) in all {
        for r in calls(Duration::from_secs(5), 2, |_| Some((0, make()))) {
            let Some(Err(CommError::Mismatch(m))) = r else {
                panic!("{r:?}");
            };
            assert!(m.contains(text), "{m}");
        }
    }
}

#[test]
fn a_timeout_names_who_is_missing() {
    let call = || {
        leaked(
            CollectiveKind::AllGather,
            ReduceOp::None,
            DType::F32,
            64,
            256,
        )
    };
    let results = calls(Duration::from_millis(100), 4, |me| {
        (me != 1).then(|| (0, call()))
    });
    for (me, r) in results.into_iter().enumerate() {
        if me == 1 {
            assert!(r.is_none());
            continue;
        }
        let Some(Err(CommError::Timeout(m))) = r else {
            panic!("{r:?}");
        };
        assert!(
            m.contains("communicator shard") && m.contains("all_gather number 0: rank 11 missing"),
            "{m}"
        );
    }
}

#[test]
fn a_collective_waits_for_the_one_launched_before_it() {
    let call = || {
        leaked(
            CollectiveKind::AllGather,
            ReduceOp::None,
            DType::F32,
            64,
            128,
        )
    };
    let results = calls(Duration::from_millis(100), 2, |_| Some((1, call())));
    for r in results {
        let Some(Err(CommError::Timeout(m))) = r else {
            panic!("{r:?}");
        };
        assert!(m.contains("number 1 waits for number 0"), "{m}");
    }
}

#[test]
fn a_failure_elsewhere_ends_the_wait() {
    let abort = Arc::new(Abort::new(Duration::from_secs(60)));
    let mut p = Build::new(4, 4, 1).finish();
    p.communicators.truncate(1);
    let all = Communicators::new(&p, &abort);
    std::thread::scope(|s| {
        let (group, position) = all.group(CommId(0), 2).unwrap();
        let waiting = s.spawn(move || {
            let call = leaked(
                CollectiveKind::AllGather,
                ReduceOp::None,
                DType::F32,
                64,
                256,
            );
            // SAFETY: the ranges are leaked.
            unsafe { group.run(position as usize, 0, call) }
        });
        std::thread::sleep(Duration::from_millis(20));
        abort.fail(Failure {
            kind: FailureKind::Panic,
            rank: 0,
            stream: None,
            instr: None,
            text: String::new(),
            message: "gone".into(),
        });
        assert_eq!(waiting.join().unwrap().unwrap_err(), CommError::Aborted);
    });
}

#[test]
fn instances_follow_the_mesh() {
    // Eight ranks as 2 x 4: shard connects neighbors, outer connects ranks four apart.
    let p = Build::new(8, 4, 2).finish();
    let all = Communicators::new(&p, &Arc::new(Abort::new(Duration::from_secs(1))));
    let seat = |comm, rank| {
        let (group, position) = all.group(CommId(comm), rank).unwrap();
        (group.ranks().to_vec(), position)
    };
    assert_eq!(seat(0, 6), (vec![4, 5, 6, 7], 2));
    assert_eq!(seat(1, 6), (vec![2, 6], 1));
    assert_eq!(seat(2, 6), ((0..8).collect(), 6));
    assert!(all.group(CommId(0), 8).is_none());
}
