//! Ranks as processes: results are bitwise equal to those of ranks as threads, and no process is
//! left when one of them ends.

use crate::{json, shardlab};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn exec(args: &[&str]) -> Value {
    let mut all = vec!["exec", "--json", "--no-store"];
    all.extend_from_slice(args);
    json(&all).remove(0)
}

fn same(a: &Value, b: &Value) {
    for key in ["losses", "grad_norms", "final_norms", "program_digest"] {
        assert_eq!(a[key], b[key], "{key}");
    }
}

#[test]
fn processes_and_threads_have_the_same_bits() {
    // Each process needs all weights to initialize DoRA's magnitudes.
    let dora = ["--set", "lora.use_dora=true", "--set", "mesh.dp_shard=2"];
    let cases: [(&str, &[&str]); 3] = [
        ("small-native", &[]),
        ("small-hsdp", &[]),
        ("small-lora", &dora),
    ];
    for (scenario, more) in cases {
        let base = [&[scenario, "--steps", "3"], more].concat();
        same(&exec(&base), &exec(&[&base[..], &["--processes"]].concat()));
    }
}

/// With inputs of 6 MiB per rank, ranks wait before each step, including validation steps.
#[test]
fn ranks_wait_for_large_inputs_of_others() {
    let large = [
        "small-linear",
        "--steps",
        "3",
        "--set",
        "train.micro_batch=8192",
        "--set",
        "model.hidden=32",
        "--set",
        "train.validate_every=2",
    ];
    same(
        &exec(&large),
        &exec(&[&large[..], &["--processes"]].concat()),
    );
}

/// Rank 0 writes the outputs of a run once: the JSON object, the timeline and the saved run.
#[test]
fn traces_and_kept_runs_are_those_of_rank_0() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (trace, store) = (path("trace.json"), path("store"));
    let base = [
        "exec",
        "small-native",
        "--steps",
        "2",
        "--processes",
        "--json",
    ];
    let more = ["--trace", &trace, "--store", &store];
    let objects = json(&[&base[..], &more].concat());
    assert_eq!(objects.len(), 1);
    let kept = json(&["runs", "--json", "--store", &store]);
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0]["id"], objects[0]["run_id"]);
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let gathers = events.iter().filter(|e| e["cat"] == "all_gather");
    let counted = objects[0]["collectives"]["all_gather"]["count"].as_f64();
    assert_eq!(Some(gathers.count() as f64), counted);
}

/// Many processes write one checkpoint, from which threads can resume, and vice versa.
#[test]
fn checkpoints_and_exports_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let whole = exec(&["small-zero2", "--steps", "6"]);
    for (name, first, second) in [
        ("a", &["--processes"][..], &[][..]),
        ("b", &[], &["--processes"]),
    ] {
        let at = path(name);
        let base = ["small-zero2", "--checkpoint-dir", &at, "--steps"];
        exec(&[&base[..], &["3"], first].concat());
        let rest = exec(&[&base[..], &["6"], second].concat());
        assert_eq!(rest["resumed_from"], 3);
        same(&whole, &rest);
    }
    let (one, two) = (path("one"), path("two"));
    exec(&["small-native", "--steps", "1", "--export", &one]);
    exec(&[
        "small-native",
        "--steps",
        "1",
        "--export",
        &two,
        "--processes",
    ]);
    let weights = |d: &str| std::fs::read(format!("{d}/model.safetensors")).unwrap();
    assert!(weights(&one) == weights(&two));
}

fn ranks(
    world: u32,
    args: &[&str],
    vars: impl Fn(u32) -> Vec<(&'static str, String)>,
) -> Vec<Child> {
    (0..world)
        .map(|rank| {
            Command::new(env!("CARGO_BIN_EXE_shardlab"))
                .args(["exec", "--json", "--no-store"])
                .args(args)
                .envs(vars(rank))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

/// Returns the environment that torchrun sets for a rank of `world` on one host.
fn torchrun(rank: u32, world: u32, port: u16) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
    ]
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn torchrun_and_mpirun_start_ranks_too() {
    let threads = exec(&["small-native", "--steps", "2"]);
    let world = threads["world_size"].as_u64().unwrap() as u32;
    let args = ["small-native", "--steps", "2"];
    let port = free_port();
    let torchrun = |rank: u32| torchrun(rank, world, port);
    let other = free_port().to_string();
    let mpirun = |rank: u32| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_SIZE", world.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", world.to_string()),
            ("SHARDLAB_PORT", other.clone()),
        ]
    };
    let starts = [ranks(world, &args, torchrun), ranks(world, &args, mpirun)];
    for children in starts {
        for (rank, child) in children.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let words = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "rank {rank}: {words}");
            // Only rank 0 prints.
            assert_eq!(output.stdout.is_empty(), rank > 0);
            if rank == 0 {
                same(&threads, &serde_json::from_slice(&output.stdout).unwrap());
            }
        }
    }
}

/// Two torchrun runs on one host may use the same ports for their stores. Each rank finds the store
/// of its own run, even if it searches while only the other one exists.
#[test]
fn runs_that_share_a_host_do_not_mix() {
    // The agents' own stores would listen on `port` and `port + 1`; those of the runs use the next
    // ports.
    let port = free_port();
    let base = ["small-native", "--set", "mesh.dp_shard=2", "--steps"];
    let start = |rank: u32, steps: &str, port: u16| {
        let vars = |_| {
            let mut vars = torchrun(rank, 2, port);
            vars.extend([
                ("TORCHELASTIC_RUN_ID", "none".to_owned()),
                ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
                ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
            ]);
            vars
        };
        ranks(1, &[&base[..], &[steps]].concat(), vars).remove(0)
    };
    let mut children = vec![start(0, "3", port + 1)];
    let begin = Instant::now();
    while TcpStream::connect(("127.0.0.1", port + 2)).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    children.push(start(1, "2", port));
    std::thread::sleep(Duration::from_millis(500));
    children.push(start(1, "3", port + 1));
    children.push(start(0, "2", port));
    for child in children {
        let output = child.wait_with_output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}");
    }
}

/// One rank reads weights for longer than the timeout of the watchdog. The others wait for it
/// before the first step.
#[test]
fn ranks_wait_for_the_weights_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (whole, slow) = (path("whole"), path("slow"));
    let base = ["small-native", "--set", "mesh.dp_shard=2"];
    let export = whole.display().to_string();
    exec(&[&base[..], &["--steps", "1", "--export", &export]].concat());
    std::fs::create_dir(&slow).unwrap();
    for file in std::fs::read_dir(&whole).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), slow.join(file.file_name())).unwrap();
    }
    // A pipe, which blocks readers until something is written to it.
    let config = slow.join("config.json");
    std::fs::remove_file(&config).unwrap();
    let made = Command::new("mkfifo").arg(&config).status().unwrap();
    assert!(made.success());
    let port = free_port().to_string();
    let start = |rank: u32, init: &std::path::Path| {
        let vars = |_| {
            vec![
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", "2".to_owned()),
                ("MASTER_ADDR", "127.0.0.1".to_owned()),
                ("MASTER_PORT", port.clone()),
            ]
        };
        let init = init.display().to_string();
        let args = ["--steps", "2", "--timeout", "2", "--init", &init];
        ranks(1, &[&base[..], &args].concat(), vars).remove(0)
    };
    let children = [start(0, &whole), start(1, &slow)];
    // Wait until the other ranks have reached the first step, and then longer than the timeout of
    // the watchdog. A run that has failed by then does not read anything.
    std::thread::sleep(Duration::from_secs(7));
    let words = std::fs::read(whole.join("config.json")).unwrap();
    std::thread::spawn(move || std::fs::write(config, words).unwrap());
    for child in children {
        let output = child.wait_with_output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}");
    }
}

#[test]
fn disagreeing_ranks_are_reported() {
    let port = free_port().to_string();
    let mut children: Vec<Child> = Vec::new();
    for (rank, steps) in [(0, "2"), (1, "2"), (2, "3"), (3, "2")] {
        let args = ["small-native", "--steps", steps];
        let vars = |_| {
            vec![
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", "4".to_owned()),
                ("MASTER_ADDR", "127.0.0.1".to_owned()),
                ("MASTER_PORT", port.clone()),
            ]
        };
        children.extend(ranks(1, &args, vars));
    }
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "rank {rank}: {words}");
        if rank == 0 {
            let part = "rank 2 has steps=Some(3), rank 0 has steps=Some(2)";
            assert!(words.contains(part), "{words}");
        }
    }
}

#[test]
fn an_environment_that_makes_no_sense() {
    for (vars, part) in [
        (&[("RANK", "1")][..], "RANK is set, but WORLD_SIZE is not"),
        (
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "3"),
                ("MASTER_ADDR", "127.0.0.1"),
            ],
            "the scenario's mesh has 4 ranks",
        ),
    ] {
        let mut command = shardlab(&["exec", "small-native"]);
        command.envs(vars.iter().copied());
        let output = command.output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(words.contains(part), "{words}");
    }
}

/// Starts a long run with several processes. Returns its launcher, and the process ids of its
/// ranks.
fn long_run(more: &[&str]) -> (Child, BufReader<std::process::ChildStderr>, Vec<u32>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
        .args([
            "exec",
            "small-native",
            "--processes",
            "--json",
            "--no-store",
        ])
        .args(["--steps", "1000000"])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    assert!(line.starts_with("step 1/1000000"), "{line}");
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 4);
    (child, errors, ranks)
}

/// Returns the child processes of a process.
pub(crate) fn children(id: u32) -> Vec<u32> {
    // Each thread has a list of the child processes that it has started.
    let threads = std::fs::read_dir(format!("/proc/{id}/task"));
    let lists = threads.into_iter().flatten().flatten();
    lists
        .flat_map(|thread| {
            let list = std::fs::read_to_string(thread.path().join("children"));
            let list = list.unwrap_or_default();
            let numbers = list.split_whitespace().map(|p| p.parse().unwrap());
            numbers.collect::<Vec<u32>>()
        })
        .collect()
}

pub(crate) fn signal(name: &str, process: u32) {
    let status = Command::new("bash")
        .args(["-c", &format!("kill -{name} {process}")])
        .status();
    assert!(status.unwrap().success());
}

/// Returns the state of a process: running `R`, sleeping `S`, stopped `T`, and others; `None` if it
/// has ended.
fn state(process: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let state = stat.rsplit_once(") ")?.1.chars().next();
    // A zombie has ended and waits to be reaped.
    state.filter(|s| *s != 'Z')
}

fn runs(process: u32) -> bool {
    state(process).is_some()
}

pub(crate) fn all_end(ranks: &[u32]) {
    let begin = Instant::now();
    while ranks.iter().any(|r| runs(*r)) {
        assert!(begin.elapsed() < Duration::from_secs(60), "ranks are left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ctrl-Z, and `fg` after more than the timeout of the watchdog: neither the store nor waiting
/// ranks count the suspended time.
#[test]
fn a_run_that_was_stopped_goes_on() {
    let (mut child, mut errors, ranks) = long_run(&["--timeout", "3"]);
    let all = [&[child.id()][..], &ranks].concat();
    // Wait until steps, and thus waits, are in progress.
    std::thread::sleep(Duration::from_millis(1500));
    all.iter().for_each(|p| signal("STOP", *p));
    std::thread::sleep(Duration::from_secs(5));
    all.iter().for_each(|p| signal("CONT", *p));
    // If the run fails, it does so at once.
    std::thread::sleep(Duration::from_secs(2));
    let go_on = all.iter().all(|p| runs(*p));
    let _ = child.kill();
    child.wait().unwrap();
    all_end(&ranks);
    let mut words = String::new();
    errors.read_to_string(&mut words).unwrap();
    assert!(go_on, "{words}");
}

/// The terminal stops only the launcher, whose process contains the store. The ranks are stopped
/// and resumed with it.
#[test]
fn ctrl_z_stops_the_ranks_too() {
    interrupted(|launcher, ranks| {
        let all = [&[launcher][..], ranks].concat();
        let wait_until = |stopped: bool| {
            let begin = Instant::now();
            while all.iter().any(|p| (state(*p) == Some('T')) != stopped) {
                assert!(begin.elapsed() < Duration::from_secs(30));
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        for _ in 0..2 {
            signal("TSTP", launcher);
            wait_until(true);
            std::thread::sleep(Duration::from_secs(2));
            signal("CONT", launcher);
            wait_until(false);
            std::thread::sleep(Duration::from_millis(300));
        }
        signal("INT", launcher);
    });
}

#[test]
fn a_rank_that_dies_ends_all() {
    for (victim, name) in [(2, "rank 2"), (0, "rank 0")] {
        let (mut child, mut errors, ranks) = long_run(&[]);
        signal("KILL", ranks[victim]);
        let mut words = String::new();
        errors.read_to_string(&mut words).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(3), "{words}");
        let part = format!("{name} was killed (signal 9");
        assert!(words.contains(&part), "{words}");
        assert!(ranks.iter().all(|r| !runs(*r)));
    }
}

/// Two processes that save every five steps are killed without warning: first one of them, then
/// both. The last checkpoint is complete, a resumed run has the losses and weights of an
/// uninterrupted one, and runs with other world sizes can load it.
#[test]
fn killed_processes_go_on_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    let checkpoints = at.display().to_string();
    let base = ["small-accumulation", "--set", "mesh.dp_shard=2"];
    let long = ["--steps", "300"];
    let whole = exec(&[&base[..], &long].concat());
    let saves = [
        "--checkpoint-dir",
        &checkpoints,
        "--checkpoint-every",
        "5",
        "--processes",
    ];
    let newest = || {
        let list = std::fs::read_dir(&at).into_iter().flatten().flatten();
        let step =
            |e: std::fs::DirEntry| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok();
        list.filter_map(step).max().unwrap_or(0u64)
    };
    for (wanted, both) in [(10, false), (30, true)] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shardlab"))
            .args(["exec", "--json", "--no-store"])
            .args([&base[..], &long, &saves].concat())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The pipe must not fill up.
        let mut errors = child.stderr.take().unwrap();
        let words = std::thread::spawn(move || {
            let mut words = String::new();
            errors.read_to_string(&mut words).unwrap();
            words
        });
        let begin = Instant::now();
        while newest() < wanted && child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
        let ranks = children(child.id());
        assert_eq!(ranks.len(), 2, "the run ended before it could be killed");
        for rank in &ranks[usize::from(!both)..] {
            signal("KILL", *rank);
        }
        assert_eq!(child.wait().unwrap().code(), Some(3));
        let words = words.join().unwrap();
        assert!(words.contains("was killed (signal 9"), "{words}");
        all_end(&ranks);
    }
    let resumed = exec(&[&base[..], &long, &saves].concat());
    assert!(resumed["resumed_from"].as_u64().unwrap() >= 30);
    same(&whole, &resumed);
    // Threads with another world size and policy, and processes with a third one.
    for other in [
        &["small-fsdp2"][..],
        &["small-zero2", "--set", "mesh.dp_shard=1"],
        &["small-hsdp", "--processes"],
    ] {
        let load = [
            "--steps",
            "301",
            "--resume",
            "300",
            "--checkpoint-dir",
            &checkpoints,
        ];
        let other = exec(&[other, &load].concat());
        assert_eq!(other["resumed_from"], 300);
        let losses = other["losses"].as_array().unwrap();
        let loss = |i: usize| losses[i].as_f64().unwrap();
        assert_eq!(losses[..300], whole["losses"].as_array().unwrap()[..]);
        assert!((loss(300) - loss(299)).abs() < 0.5, "{}", loss(300));
    }
}

#[test]
fn ranks_end_with_their_launcher() {
    let (mut child, _errors, ranks) = long_run(&[]);
    signal("KILL", child.id());
    child.wait().unwrap();
    all_end(&ranks);
}

#[test]
fn an_interruption_of_all_ranks() {
    interrupted(|launcher, _| signal("INT", launcher));
}

/// A batch scheduler signals every process of a job.
#[test]
fn the_end_of_a_job() {
    interrupted(|launcher, ranks| {
        ranks.iter().for_each(|r| signal("TERM", *r));
        signal("TERM", launcher);
    });
}

/// If only one host of a job receives the signal, only one rank does, and it is not the one that
/// prints.
#[test]
fn the_end_of_one_rank() {
    interrupted(|_, ranks| signal("TERM", ranks[2]));
}

/// The same for ranks that another launcher has started.
#[test]
fn the_end_of_one_rank_that_another_launcher_started() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("c");
    let port = free_port();
    let checkpoints = at.display().to_string();
    let mut two = ranks(
        2,
        &[
            "small-accumulation",
            "--set",
            "mesh.dp_shard=2",
            "--steps",
            "1000000",
            "--checkpoint-dir",
            &checkpoints,
        ],
        |rank| torchrun(rank, 2, port),
    );
    let mut errors = BufReader::new(two[0].stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    assert!(line.starts_with("step 1/1000000"), "{line}");
    signal("TERM", two[1].id());
    let words = std::thread::spawn(move || {
        let mut words = String::new();
        errors.read_to_string(&mut words).unwrap();
        words
    });
    let outputs: Vec<_> = two
        .into_iter()
        .map(|c| c.wait_with_output().unwrap())
        .collect();
    let words = words.join().unwrap();
    let codes: Vec<_> = outputs.iter().map(|o| o.status.code()).collect();
    assert_eq!(codes, [Some(3), Some(3)], "{words}");
    let run: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(run["interrupted"], true);
    let done = run["losses"].as_array().unwrap().len();
    assert!(words.contains(&format!("interrupted after step {done}")));
    assert!(at.join(format!("step-{done:08}")).is_dir(), "{words}");
}

fn interrupted(tell: impl FnOnce(u32, &[u32])) {
    let (child, mut errors, ranks) = long_run(&[]);
    tell(child.id(), &ranks);
    // The pipe must not fill up during the last step.
    let words = std::thread::spawn(move || {
        let mut words = String::new();
        errors.read_to_string(&mut words).unwrap();
        words
    });
    let output = child.wait_with_output().unwrap();
    let words = words.join().unwrap();
    assert_eq!(output.status.code(), Some(3), "{words}");
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["interrupted"], true);
    assert!(ranks.iter().all(|r| !runs(*r)));
}
