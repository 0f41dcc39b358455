//! Cost of the interpreter per instruction, with the null device and with the CPU device's queues.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use shardlab_exec::device::null::NullDevice;
use shardlab_exec::device::{Abort, NO_HYPER};
use shardlab_exec::engine::{ExecOptions, RankInputs, Session, StepInputs};
use shardlab_exec::{LaunchContext, RawRange};
use shardlab_plan::ir::Holds;
use shardlab_plan::program::{Op, Program, SectionKind};
use std::sync::Arc;
use std::time::Duration;

/// Plans a shipped scenario.
fn program(name: &str, set: &[&str]) -> Arc<Program> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let text = shardlab_plan::scenario::shipped()
        .iter()
        .find(|s| s.0 == name)
        .expect("a shipped scenario")
        .1;
    let scenario = shardlab_plan::scenario::parse(name, text, &set).expect("a valid scenario");
    Arc::new(shardlab_plan::plan(&scenario).expect("a plan"))
}

/// Returns zeros for every input of a step.
fn inputs(program: &Program, ranks: usize) -> StepInputs {
    let mut rank = RankInputs::default();
    let section = program.section(SectionKind::First).expect("a first step");
    for instr in program.section_instrs(section) {
        let Op::Alloc(id) = instr.op else { continue };
        let b = &program.buffers[id.index()];
        if let Holds::Const(c) = b.holds {
            let m = usize::from(instr.micro_batch);
            rank.micro_batches
                .resize(rank.micro_batches.len().max(m + 1), Vec::new());
            rank.micro_batches[m].push((c, vec![0; b.bytes.0 as usize].into()));
        }
    }
    StepInputs {
        ranks: vec![rank; ranks],
    }
}

/// A kernel that does nothing.
///
/// # Safety
/// It accesses no range.
unsafe fn nothing(_: &LaunchContext<'_>, _: &[RawRange], _: &[RawRange]) -> Result<(), String> {
    Ok(())
}

fn interpreter(c: &mut Criterion) {
    let mut group = c.benchmark_group("interpreter");
    for (name, policy) in [
        ("llama3-8b-4xh200", "native"),
        ("llama3-8b-4xh200", "fsdp2"),
        ("llama3-8b-4xh200", "megatron"),
    ] {
        let p = program(name, &[&format!("fsdp.policy={policy}")]);
        let steady = p.section(SectionKind::Steady).expect("a steady step");
        group.throughput(Throughput::Elements(steady.instrs.len() as u64));
        // One rank's host: the null device waits for no other rank.
        let abort = Arc::new(Abort::new(Duration::from_secs(60)));
        let devices = vec![NullDevice::default()];
        let mut session =
            Session::with_devices(Arc::clone(&p), ExecOptions::default(), abort, devices)
                .expect("a session");
        let inputs = inputs(&p, 1);
        session.step(&inputs, NO_HYPER).expect("a step");
        group.bench_function(policy, |b| {
            b.iter(|| session.step(&inputs, NO_HYPER).expect("a step"))
        });
    }
    group.finish();
}

fn queues(c: &mut Criterion) {
    let mut group = c.benchmark_group("cpu device");
    let p = program(
        "peers-tiny",
        &[
            "mesh.dp_shard=1",
            "train.seq_len=128",
            "train.micro_batch=1",
        ],
    );
    let steady = p.section(SectionKind::Steady).expect("a steady step");
    group.throughput(Throughput::Elements(steady.instrs.len() as u64));
    let mut session =
        Session::with_launcher(Arc::clone(&p), ExecOptions::default(), nothing).expect("a session");
    let inputs = inputs(&p, 1);
    session.step(&inputs, NO_HYPER).expect("a step");
    group.bench_function("empty kernels, one rank", |b| {
        b.iter(|| session.step(&inputs, NO_HYPER).expect("a step"))
    });
    group.finish();
}

criterion_group!(benches, interpreter, queues);
criterion_main!(benches);
