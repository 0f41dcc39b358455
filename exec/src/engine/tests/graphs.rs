//! Captured scopes.

use super::*;

#[test]
fn a_replayed_scope_gives_the_same_bits_and_spans() {
    let run = |graphs| {
        let toy = toy(4, Pool::Planned, true);
        let options = ExecOptions {
            graphs,
            record: true,
            ..quick()
        };
        let mut s = session(&toy.p, toy.weight, options);
        let results = steps(&mut s, 4).unwrap();
        let spans: Vec<Vec<(InstrId, StreamId)>> = results
            .iter()
            .map(|r| r.spans.iter().map(|s| (s.instr, s.stream)).collect())
            .collect();
        let losses: Vec<f64> = results.iter().map(|r| r.loss).collect();
        (weights(&mut s, toy.weight), spans, losses)
    };
    let eager = run(false);
    let graphs = run(true);
    assert_eq!(eager, graphs);
    assert_eq!(eager.1[3].len(), 7);
}

/// A buffer that alternates between two addresses cannot be used by a scope.
#[test]
fn a_moved_buffer_is_found_before_the_replay() {
    let mut b = Build::new(1, 1, 1);
    let [x, y, z] = [0; 3].map(|_| b.buffer(Role::Temporary, 4096));
    b.alloc(x);
    b.end_section(SectionKind::Init);
    let scope = b.add_scope("scope".to_owned());
    b.alloc(y);
    b.emit(Op::GraphBegin(scope));
    let access = b.whole(y);
    b.shard_op(ShardOp::Zero, COMPUTE, &[], &[access]);
    b.emit(Op::GraphEnd(scope));
    // x takes the free slot that z does not take: x and y swap places in every step.
    b.free(x);
    b.alloc(z);
    b.free(y);
    b.alloc(x);
    b.free(z);
    b.end_section(SectionKind::First);
    b.repeat();
    let mut s = Session::with_launcher(Arc::new(b.finish()), quick(), shard_ops).unwrap();
    steps(&mut s, 2).unwrap();
    let e = steps(&mut s, 1).unwrap_err();
    assert!(e.to_string().contains("when the scope was captured"), "{e}");
}

#[test]
fn a_scope_may_allocate_and_free() {
    let mut b = Build::new(1, 1, 1);
    let out = b.buffer(Role::ModelWeight, NUMEL * 4);
    let tmp = b.buffer(Role::Temporary, NUMEL * 4);
    b.alloc(out);
    b.end_section(SectionKind::Init);
    let scope = b.add_scope("scope".to_owned());
    b.emit(Op::GraphBegin(scope));
    let (o, t) = (b.whole(out), b.whole(tmp));
    for _ in 0..2 {
        b.alloc(tmp);
        b.shard_op(ShardOp::Copy, COMPUTE, &[o], &[t]);
        b.shard_op(ShardOp::Accumulate, COMPUTE, &[t, o], &[o]);
        b.free(tmp);
    }
    b.emit(Op::GraphEnd(scope));
    b.end_section(SectionKind::First);
    b.repeat();
    let mut s = session(&b.finish(), out, quick());
    steps(&mut s, 4).unwrap();
    let wanted: Vec<f32> = (0..NUMEL).map(|i| start_value(0, i) * 256.0).collect();
    assert_eq!(weights(&mut s, out)[0], wanted);
}
