//! Results of steps, inputs, scalars, spans, the run.

use super::*;
use shardlab_plan::record::RunKind;

#[test]
fn weights_follow_the_closed_form_in_every_world() {
    for ranks in [1, 2, 3, 4, 8] {
        let toy = toy(ranks, Pool::Caching, false);
        let mut s = session(&toy.p, toy.weight, quick());
        let results = steps(&mut s, 3).unwrap();
        // The same arithmetic, in rank order.
        let step = |w: f32| (1..ranks).fold(w * 0.5, |a, _| a + w * 0.5) + w;
        for (r, got) in weights(&mut s, toy.weight).into_iter().enumerate() {
            let wanted: Vec<f32> = (0..NUMEL)
                .map(|i| (0..3).fold(start_value(r as u32, i), |w, _| step(w)))
                .collect();
            assert_eq!(got, wanted, "rank {r} of {ranks}");
        }
        // The loss is the sum of squares of the gathered weights, the same on every rank.
        let all: Vec<f32> = (0..ranks)
            .flat_map(|r| (0..NUMEL).map(move |i| start_value(r, i)))
            .collect();
        let loss: f32 = all.iter().map(|x| x.powi(2)).sum();
        assert_eq!(results[0].losses, vec![vec![loss]; ranks as usize]);
        assert!(results[1].loss > results[0].loss);
    }
}

#[test]
fn a_watcher_sees_where_ranks_are_and_what_each_did() {
    let toy = toy(2, Pool::Caching, false);
    let progress = Arc::new(Progress::new(2));
    let options = ExecOptions {
        progress: Some(Arc::clone(&progress)),
        ..quick()
    };
    let mut s = session(&toy.p, toy.weight, options);
    let results = steps(&mut s, 2).unwrap();
    let steady = toy.p.section(SectionKind::Steady).unwrap();
    for (rank, now) in (0..).zip(progress.ranks()) {
        assert_eq!(now.at, Some(InstrId(steady.instrs.end - 1)));
        let memory = s.rank_memory(rank).unwrap();
        assert_eq!(
            (now.allocated, now.reserved),
            (memory.allocated, memory.reserved)
        );
    }
    let ranks = &results[1].ranks;
    assert_eq!(ranks.iter().map(|r| r.rank).collect::<Vec<_>>(), [0, 1]);
    for r in ranks {
        assert!(r.host <= r.time);
        assert_eq!(r.peak_allocated, results[1].record.peak_allocated);
    }
}

#[test]
fn every_allocator_gives_the_same_bits() {
    let run = |pool| {
        let toy = toy(4, pool, false);
        let mut s = session(&toy.p, toy.weight, quick());
        steps(&mut s, 3).unwrap();
        weights(&mut s, toy.weight)
    };
    let caching = run(Pool::Caching);
    assert_eq!(run(Pool::Planned), caching);
}

#[test]
fn state_of_the_first_step_starts_at_zero_or_at_its_preset() {
    let toy = toy(2, Pool::Caching, false);
    let mut s = session(&toy.p, toy.weight, quick());
    assert!(s.read_buffer(0, toy.moment, 0, 8).is_err());
    let preset: Arc<[u8]> = (0..NUMEL).flat_map(|_| 5f32.to_le_bytes()).collect();
    s.preset_buffer(1, toy.moment, preset).unwrap();
    steps(&mut s, 1).unwrap();
    assert!(s.read_buffer(0, toy.moment, 0, 8).is_ok());
    for rank in [0, 1] {
        let got = floats(&s.read_buffer(rank, toy.moment, 0, 8).unwrap());
        let wanted: Vec<f32> = (0..2)
            .map(|i| start_value(rank, i) + rank as f32 * 5.0)
            .collect();
        assert_eq!(got, wanted);
    }
    assert!(s.preset_buffer(0, toy.moment, Arc::from([0u8; 3])).is_err());
    assert!(s.read_buffer(0, toy.moment, 0, NUMEL * 4 + 1).is_err());
    assert!(s.read_buffer(2, toy.moment, 0, 4).is_err());
}

/// In-place forms over both axes of a 2 x 2 mesh: every rank fills its slice, gathers over the
/// inner axis, sums over the outer one.
#[test]
fn ranges_shift_by_axis_and_collectives_work_in_place() {
    let mut b = Build::new(4, 2, 2);
    let mine = b.buffer(Role::ModelWeight, 16);
    let all = b.buffer(Role::MainGrad, 32);
    b.alloc(mine);
    b.alloc(all);
    b.end_section(SectionKind::Init);
    let (whole, slice) = (b.whole(all), b.slice(all));
    let m = b.whole(mine);
    b.copy(COMPUTE, m, slice);
    b.collective(CollectiveKind::AllGather, SHARD, COMPUTE, slice, whole);
    b.collective(CollectiveKind::AllReduce, OUTER, COMPUTE, whole, whole);
    b.end_section(SectionKind::First);
    let p = b.finish();
    let mut s = Session::with_launcher(Arc::new(p), quick(), shard_ops).unwrap();
    for r in 0..4u32 {
        let data: Vec<u8> = (0..4)
            .flat_map(|i| ((10 * (r + 1) + i) as f32).to_le_bytes())
            .collect();
        s.write_buffer(r, mine, 0, &data).unwrap();
    }
    s.step(&StepInputs::default(), NO_HYPER).unwrap();
    for r in 0..4 {
        let got = floats(&s.read_buffer(r, all, 0, 32).unwrap());
        // Ranks 0 and 2 fill the first half, 1 and 3 the second.
        assert_eq!(got, [40., 42., 44., 46., 60., 62., 64., 66.]);
    }
}

#[test]
fn inputs_reach_their_buffers_and_are_checked() {
    let mut b = Build::new(2, 2, 1);
    let input = b.buffer(Role::Input, 8);
    b.program.buffers[input.index()].holds = Holds::Const(ConstId(0));
    let loss = b.buffer(Role::Temporary, 4);
    b.program.loss = Some(loss);
    b.end_section(SectionKind::Init);
    b.program.meta.micro_batches = 2;
    for m in 0..2 {
        b.tag.micro_batch = m;
        b.alloc(input);
        b.alloc(loss);
        let (i, l) = (b.whole(input), b.whole(loss));
        b.shard_op(ShardOp::SumSquares, COMPUTE, &[i], &[l]);
        b.free(loss);
        b.free(input);
    }
    b.end_section(SectionKind::First);
    let p = Arc::new(b.finish());
    let pair = |x: f32| {
        let bytes: Arc<[u8]> = [x, 1.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        vec![(ConstId(0), bytes)]
    };
    let rank = |x| RankInputs {
        micro_batches: vec![pair(x), pair(x + 1.0)],
        ..RankInputs::default()
    };
    let mut s = Session::with_launcher(Arc::clone(&p), quick(), shard_ops).unwrap();
    let inputs = StepInputs {
        ranks: vec![rank(2.0), rank(5.0)],
    };
    let r = s.step(&inputs, NO_HYPER).unwrap();
    assert_eq!(r.losses, [[5.0, 10.0], [26.0, 37.0]]);
    assert_eq!(r.loss, (5.0 + 10.0 + 26.0 + 37.0) / 4.0);

    let mut s = Session::with_launcher(p, quick(), shard_ops).unwrap();
    let missing = StepInputs {
        ranks: vec![rank(2.0)],
    };
    let e = s.step(&missing, NO_HYPER).unwrap_err();
    assert!(e.to_string().contains("0 bytes given, 8 needed"), "{e}");
}

#[test]
fn spans_are_causal_and_the_run_is_complete() {
    let toy = toy(4, Pool::Caching, false);
    let options = ExecOptions {
        record: true,
        ..quick()
    };
    let mut s = session(&toy.p, toy.weight, options);
    let results = steps(&mut s, 3).unwrap();
    let last = &results[2];
    // Two collectives and five kernels.
    assert_eq!(last.spans.len(), 7);
    let mut ends = [0u64; 3];
    for span in &last.spans {
        assert!(span.issued <= span.ready && span.ready <= span.start && span.start <= span.end);
        assert!(
            span.start.0 >= ends[span.stream.index()],
            "streams are first in first out"
        );
        ends[span.stream.index()] = span.end.0;
        assert!(span.start >= last.record.start && span.end <= last.record.end);
    }
    let of = |i: InstrId| last.spans.iter().find(|s| s.instr == i).unwrap();
    assert!(of(toy.kernel).start >= of(toy.gather).end);
    assert!(of(toy.reduce).start >= of(toy.kernel).end);
    let run = s.into_run();
    assert_eq!(run.kind, RunKind::Exec);
    assert_eq!(run.program_digest, toy.p.digest());
    assert_eq!(run.losses.len(), 3);
    assert_eq!((run.steps.len(), run.step_samples.len()), (3, 2));
    assert_eq!(run.collectives[&CollectiveKind::AllGather].count, 1);
    assert_eq!(run.spans.len(), 7);
    assert!(
        run.summary()
            .memory
            .peak_allocated_bytes
            .is_some_and(|bytes| bytes > 0)
    );
}
