//! Every storage is allocated before use, not used after its end, and freed once.

use super::*;

pub(super) fn check(t: &Tape) {
    let mut state = vec![0u8; t.storages.len()];
    let mut walk = |ops: &[TapeOp]| {
        for op in ops {
            match *op {
                TapeOp::Alloc(s) => {
                    assert_eq!(state[s.index()], 0, "storage {s:?} allocated twice");
                    state[s.index()] = 1;
                }
                TapeOp::Free(s) => {
                    assert_eq!(state[s.index()], 1, "storage {s:?} freed while not alive");
                    state[s.index()] = 2;
                }
                TapeOp::Launch { reads, end, .. } => {
                    for o in &t.operands[reads as usize..end as usize] {
                        if let Source::Storage(s) = o.source {
                            assert_eq!(state[s.index()], 1, "storage {s:?} used while not alive");
                            assert!(
                                o.offset + o.bytes <= t.storages[s.index()].bytes.0,
                                "{s:?} {o:?}"
                            );
                        }
                    }
                }
                _ => {}
            }
        }
    };
    walk(&t.forward);
    walk(&t.backward);
    walk(&t.eval);
    assert!(
        state.iter().all(|&s| s == 2),
        "every storage is freed by the end"
    );
}

/// Checks that modules are entered and left like brackets, each once per phase, and that every
/// trained parameter becomes ready once. A loss in chunks may call the head once per chunk.
pub(super) fn check_marks(t: &Tape) {
    for ops in [&t.forward, &t.backward, &t.eval] {
        let (mut open, mut again) = (vec![], vec![]);
        let mut entries = std::collections::BTreeMap::new();
        for op in ops {
            match *op {
                TapeOp::Enter(m) => {
                    *entries.entry(m).or_insert(0) += 1;
                    open.push(m);
                }
                TapeOp::Exit(m) => assert_eq!(open.pop(), Some(m)),
                TapeOp::EnterRecompute(m) => again.push(m),
                TapeOp::ExitRecompute(m) => assert_eq!(again.pop(), Some(m)),
                _ => {}
            }
        }
        assert!(open.is_empty() && again.is_empty());
        let kind = |m: &ModuleId| t.modules[m.index()].kind;
        let loss = entries.iter().find(|(m, _)| kind(m) == ModuleKind::Loss);
        // The sum over chunks belongs to the model, before or after the calls of the head.
        let calls = loss.map_or(1, |(_, n)| n + 1);
        for (m, n) in &entries {
            let called = matches!(
                kind(m),
                ModuleKind::Root | ModuleKind::Head | ModuleKind::Loss
            );
            let most = if called { calls } else { 1 };
            assert!(*n <= most, "{m:?} entered {n} times");
        }
    }
    let ready: Vec<ParamId> = t
        .backward
        .iter()
        .filter_map(|op| {
            if let TapeOp::GradReady(p) = *op {
                Some(p)
            } else {
                None
            }
        })
        .collect();
    let mut sorted = ready.clone();
    sorted.sort();
    let trained: Vec<ParamId> = (0..t.params.len() as u32)
        .map(ParamId)
        .filter(|p| t.params[p.index()].requires_grad)
        .collect();
    assert_eq!(sorted, trained);
}

#[test]
fn storages_live_correctly() {
    for family in [
        Family::Llama,
        Family::Gpt2,
        Family::Encoder,
        Family::Linear,
        Family::Cnn,
    ] {
        for recompute in [Recompute::None, Recompute::Full, Recompute::Selective] {
            for loss in [Loss::Materialized, Loss::Chunked] {
                let mut s = tiny(family);
                (s.train.recompute, s.train.loss) = (recompute, loss);
                let t = build(&s);
                check(&t);
                check_marks(&t);
            }
        }
    }
}
