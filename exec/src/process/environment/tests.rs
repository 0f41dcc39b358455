use super::*;

fn of(vars: &[(&str, &str)]) -> Read<Option<Placement>> {
    read(&|name| {
        let found = vars.iter().find(|(n, _)| *n == name);
        found.map(|(_, v)| (*v).to_owned())
    })
}

fn place(vars: &[(&str, &str)]) -> Placement {
    of(vars).unwrap().unwrap()
}

fn error(vars: &[(&str, &str)]) -> String {
    of(vars).unwrap_err().to_string()
}

const TORCHRUN: [(&str, &str); 5] = [
    ("RANK", "5"),
    ("LOCAL_RANK", "1"),
    ("WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29400"),
];

#[test]
fn a_process_without_launcher_is_single() {
    assert_eq!(of(&[]), Ok(None));
    assert_eq!(of(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
    // A Slurm batch script, outside of srun.
    let batch = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_JOB_ID", "7"),
    ];
    assert_eq!(of(&batch), Ok(None));
}

#[test]
fn torchrun() {
    let p = place(&TORCHRUN);
    assert_eq!(
        (p.launcher, p.rank, p.world, p.local_rank),
        (Launcher::Torchrun, 5, 8, 1)
    );
    assert_eq!((p.host.as_str(), p.ports[0]), ("node1", 29400));
    // torchrun's own store listens on the port.
    let mut vars = TORCHRUN.to_vec();
    vars.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
    vars.push(("TORCHELASTIC_RUN_ID", "abc"));
    let p = place(&vars);
    assert_eq!((p.ports[0], p.run.as_str()), (29401, "abc@29400"));
    // torchrun is started by srun, once per node. torchrun's variables describe this process.
    vars.extend([("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")]);
    assert_eq!(place(&vars).rank, 5);
    vars.push(("SHARDLAB_PORT", "7000"));
    assert_eq!(place(&vars).ports, [7000]);
}

#[test]
fn srun() {
    let vars = [
        ("SLURM_PROCID", "3"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_NODELIST", "gpu-[017-018,3]"),
        ("SLURM_JOB_ID", "129"),
        ("SLURM_STEP_ID", "0"),
    ];
    let p = place(&vars);
    assert_eq!((p.rank, p.world, p.local_rank), (3, 4, 1));
    assert_eq!(
        (p.host.as_str(), p.run.as_str()),
        ("gpu-017", "129.0@29516")
    );
    assert_eq!(p.ports[0], 29516);
    // If srun runs one script that starts another launcher, srun does not describe the ranks.
    let mut vars = TORCHRUN.to_vec();
    vars.extend([("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]);
    assert_eq!(place(&vars).rank, 5);
}

#[test]
fn mpirun() {
    let mut vars = vec![
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let p = place(&vars);
    assert_eq!(
        (p.launcher, p.rank, p.host.as_str()),
        (Launcher::OpenMpi, 1, "127.0.0.1")
    );
    vars[3].1 = "1";
    assert!(error(&vars).contains("MASTER_ADDR"), "{}", error(&vars));
    vars.push(("MASTER_ADDR", "h"));
    assert_eq!(place(&vars).host, "h");
    let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MASTER_ADDR", "h")];
    assert_eq!(place(&pmi).launcher, Launcher::Pmi);
}

/// Two runs on the same host. Neither must join the other's store.
#[test]
fn runs_that_share_a_host() {
    let torchrun = |port: &'static str| {
        let mut vars = TORCHRUN.to_vec();
        vars[4].1 = port;
        // torchrun's default run id.
        vars.push(("TORCHELASTIC_RUN_ID", "none"));
        vars.push(("TORCHELASTIC_RESTART_COUNT", "0"));
        vars.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        place(&vars)
    };
    let (one, other) = (torchrun("29500"), torchrun("29501"));
    assert!(one.ports.iter().any(|p| other.ports.contains(p)));
    assert_ne!(one.run, other.run);
    // Runs with neither names nor ports cannot be distinguished, so only the first port is tried.
    let pmi = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("MPI_LOCALNRANKS", "2"),
    ];
    assert_eq!(place(&pmi).ports, [29500]);
    assert_eq!(place(&TORCHRUN).ports, [29400]);
}

/// With `--mpi=pmi2` or `cray_shasta`.
#[test]
fn srun_that_speaks_pmi() {
    let vars = [
        ("SLURM_PROCID", "5"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_STEP_NODELIST", "gpu-[1-2]"),
        ("PMI_RANK", "5"),
        ("PMI_SIZE", "8"),
    ];
    let p = place(&vars);
    assert_eq!((p.launcher, p.rank), (Launcher::Srun, 5));
    assert_eq!((p.local_rank, p.host.as_str()), (1, "gpu-1"));
}

/// srun starts the daemons of mpirun, one per node, and the ranks inherit the variables that srun
/// set for them.
#[test]
fn mpirun_within_a_slurm_job() {
    let daemon = [
        ("SLURM_PROCID", "1"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("MASTER_ADDR", "h"),
    ];
    let mut vars = daemon.to_vec();
    vars.extend([
        ("OMPI_COMM_WORLD_RANK", "9"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "12"),
    ]);
    let p = place(&vars);
    assert_eq!(
        (p.launcher, p.rank, p.world, p.local_rank),
        (Launcher::OpenMpi, 9, 12, 1)
    );
    let mut vars = daemon.to_vec();
    vars.extend([
        ("PMI_RANK", "9"),
        ("PMI_SIZE", "12"),
        ("PMI_ID", "9"),
        ("MPI_LOCALRANKID", "1"),
        ("HYDRA_BSTRAP_JOBID", "3"),
    ]);
    let p = place(&vars);
    assert_eq!(
        (p.launcher, p.rank, p.world, p.local_rank),
        (Launcher::Pmi, 9, 12, 1)
    );
    // The same for all ranks.
    assert_eq!(p.run, "3@29500");
}

#[test]
fn its_own_launcher_comes_first() {
    let mut vars = TORCHRUN.to_vec();
    vars.extend([
        ("SHARDLAB_RANK", "2"),
        ("SHARDLAB_WORLD_SIZE", "4"),
        ("SHARDLAB_MEETING", "127.0.0.1:4000"),
        ("SHARDLAB_RUN", "r"),
    ]);
    let p = place(&vars);
    assert_eq!(
        (p.launcher, p.rank, p.local_rank, p.ports[0]),
        (Launcher::Shardlab, 2, 2, 4000)
    );
    assert!(error(&[("SHARDLAB_RANK", "1")]).contains("SHARDLAB_WORLD_SIZE is not"));
}

#[test]
fn contradictions_are_named() {
    let with = |name: &'static str, value: &'static str| {
        let mut vars: Vec<(&str, &str)> = TORCHRUN
            .iter()
            .copied()
            .filter(|(n, _)| *n != name)
            .collect();
        if !value.is_empty() {
            vars.push((name, value));
        }
        error(&vars)
    };
    assert_eq!(
        with("WORLD_SIZE", ""),
        "the environment: RANK is set, but WORLD_SIZE is not"
    );
    assert_eq!(
        with("RANK", ""),
        "the environment: WORLD_SIZE is set, but RANK is not"
    );
    assert!(with("RANK", "8").contains("there is no rank 8 of 8"));
    assert!(with("RANK", "first").contains("RANK is `first`; expected an integer"));
    assert!(with("MASTER_PORT", "70000").contains("a port from 1 to 65535"));
    assert!(with("MASTER_ADDR", "").contains("MASTER_ADDR"));
    let mut both = TORCHRUN.to_vec();
    both.extend([("SLURM_PROCID", "4"), ("SLURM_STEP_NUM_TASKS", "8")]);
    assert_eq!(
        error(&both),
        "the environment: torchrun (RANK, WORLD_SIZE) says rank 5 of 8, but srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS) says rank 4 of 8: unset the variables of one of them"
    );
}

#[test]
fn hosts_of_slurm() {
    for (list, first) in [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("node[03-05,7],other", "node03"),
        ("a,b[1-2]", "a"),
        ("n[9]", "n9"),
        ("r[1-2]-x,r3", "r1-x"),
    ] {
        assert_eq!(first_host(list), first, "{list}");
    }
}
