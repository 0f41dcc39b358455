//! Known faults that can be injected on purpose, to show that a gate fails.

use shardlab_plan::Program;
use shardlab_plan::ir::{
    Buffer, BufferId, CollectiveKind, Holds, InstrId, OpKind, ReduceOp, Role, ShardOp,
};
use shardlab_plan::program::{Instr, Op, Phase, Rule, SectionKind};

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Plant {
    /// Hold one more buffer throughout every step, as large as the full weights of the largest unit
    Memory,
    /// Sum gradients instead of averaging them
    Scale,
    /// Skip one all-gather in every step but the first, so that a unit computes with stale weights
    Stale,
    /// Launch every forward kernel twice
    Slow,
}

impl Plant {
    /// All faults.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Scale, Self::Stale, Self::Slow];

    /// Returns the name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Scale => "scale",
            Self::Stale => "stale",
            Self::Slow => "slow",
        }
    }

    /// Returns the program with the fault injected.
    ///
    /// # Errors
    /// Returns the reason if this program cannot have the fault.
    pub fn into(self, mut program: Program) -> Result<Program, &'static str> {
        match self {
            Self::Memory => memory(&mut program)?,
            Self::Scale => scale(&mut program)?,
            Self::Stale => stale(&mut program)?,
            Self::Slow => slow(&mut program)?,
        }
        Ok(program)
    }
}

/// Rewrites the instructions of a program: each is replaced by any number of instructions in the
/// same section.
fn rewrite(program: &mut Program, mut each: impl FnMut(SectionKind, InstrId, Instr) -> Vec<Instr>) {
    let mut all = Vec::with_capacity(program.instrs.len());
    for section in &mut program.sections {
        let start = all.len() as u32;
        for i in section.instrs.clone() {
            all.extend(each(section.kind, InstrId(i), program.instrs[i as usize]));
        }
        section.instrs = start..all.len() as u32;
    }
    program.instrs = all;
}

fn memory(program: &mut Program) -> Result<(), &'static str> {
    let model = program
        .buffers
        .iter()
        .filter(|b| matches!(b.role, Role::FullWeight | Role::GatherBuffer))
        .max_by_key(|b| b.bytes)
        .copied()
        .ok_or("nothing is gathered")?;
    let key = program.buffers.iter().map(|b| b.key).max().unwrap_or(0) + 1;
    let id = BufferId(program.buffers.len() as u32);
    program.buffers.push(Buffer {
        holds: Holds::Named("planted"),
        key,
        ..model
    });
    let ends: Vec<(SectionKind, u32, u32)> = program
        .sections
        .iter()
        .map(|s| (s.kind, s.instrs.start, s.instrs.end.saturating_sub(1)))
        .collect();
    rewrite(program, |kind, i, instr| {
        let of = |op| Instr {
            op,
            unit: model.unit,
            rule: Rule::Unshard,
            ..instr
        };
        let here = ends
            .iter()
            .find(|(k, ..)| *k == kind)
            .filter(|(k, ..)| k.is_training());
        let mut out = Vec::new();
        if here.is_some_and(|(_, first, _)| *first == i.0) {
            out.push(of(Op::Alloc(id)));
        }
        out.push(instr);
        if here.is_some_and(|(_, _, last)| *last == i.0) {
            out.push(of(Op::Free(id)));
        }
        out
    });
    Ok(())
}

fn scale(program: &mut Program) -> Result<(), &'static str> {
    let mut found = false;
    for c in &mut program.collectives {
        if matches!(c.reduce, ReduceOp::Avg | ReduceOp::PremulSum(_)) {
            c.reduce = ReduceOp::Sum;
            found = true;
        }
    }
    for op in program.kernels.iter_mut().flat_map(|k| &mut k.body) {
        if let OpKind::Shard(ShardOp::Scale { factor }) = &mut op.op {
            factor.0 = 1.0;
            found = true;
        }
    }
    if found {
        Ok(())
    } else {
        Err("gradients are not scaled")
    }
}

fn stale(program: &mut Program) -> Result<(), &'static str> {
    let steady = program
        .section(SectionKind::Steady)
        .ok_or("there is no steady step")?;
    let gathers: Vec<u32> = steady
        .instrs
        .clone()
        .filter(|i| {
            let instr = &program.instrs[*i as usize];
            let Op::Collective { id, .. } = instr.op else {
                return false;
            };
            instr.phase == Phase::Forward
                && program.collectives[id.index()].kind == CollectiveKind::AllGather
        })
        .collect();
    let skipped = *gathers
        .get(gathers.len() / 2)
        .ok_or("nothing is gathered in forward")?;
    rewrite(
        program,
        |_, i, instr| {
            if i.0 == skipped { vec![] } else { vec![instr] }
        },
    );
    Ok(())
}

fn slow(program: &mut Program) -> Result<(), &'static str> {
    let pure = |p: &Program, instr: &Instr| {
        let reads = p.reads(&instr.op);
        instr.phase == Phase::Forward
            && instr.rule == Rule::Model
            && matches!(instr.op, Op::Launch { .. })
            && p.writes(&instr.op)
                .iter()
                .all(|w| reads.iter().all(|r| r.buffer != w.buffer))
    };
    let twice: Vec<bool> = program.instrs.iter().map(|i| pure(program, i)).collect();
    if !twice.contains(&true) {
        return Err("forward launches no kernel that could run twice");
    }
    rewrite(program, |kind, i, instr| {
        if kind.is_training() && twice[i.index()] {
            vec![instr, instr]
        } else {
            vec![instr]
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardlab_plan::check::check;
    use std::path::Path;

    fn program(name: &str) -> Program {
        let scenario = shardlab_plan::scenario::load(Path::new(name), &[]).unwrap();
        shardlab_plan::plan(&scenario).unwrap()
    }

    #[test]
    fn every_policy_can_have_every_fault() {
        for name in ["small-native", "small-fsdp2", "small-megatron"] {
            let good = program(name);
            for plant in Plant::ALL {
                let bad = plant
                    .into(good.clone())
                    .unwrap_or_else(|e| panic!("{name} {plant:?}: {e}"));
                assert_ne!(bad.digest(), good.digest(), "{name} {plant:?}");
                let counts = |p: &Program| p.sections.iter().map(|s| s.instrs.len()).sum::<usize>();
                let more = counts(&bad) as i64 - counts(&good) as i64;
                match plant {
                    Plant::Memory => assert_eq!(more, 4),
                    Plant::Scale => assert_eq!(more, 0),
                    Plant::Stale => assert_eq!(more, -1),
                    Plant::Slow => assert!(more > 40, "{more}"),
                }
                assert_eq!(counts(&bad), bad.instrs.len());
            }
        }
    }

    #[test]
    fn what_a_program_lacks_cannot_be_broken() {
        let p = program("small-ddp");
        assert!(Plant::Stale.into(p).is_err());
    }

    #[test]
    fn a_skipped_gather_is_no_proof() {
        let bad = Plant::Stale.into(program("small-native")).unwrap();
        assert!(!check(&bad).is_ok());
    }
}
