//! Reads the rank of a process from the environment variables that its launcher sets.
//!
//! Known launchers are shardlab itself, torchrun (and all others that set `RANK` and `WORLD_SIZE`),
//! Slurm's `srun`, Open MPI's `mpirun`, and those of MPICH and Intel MPI. If several launchers have
//! set variables, the innermost launcher counts if it can be identified; otherwise all of them must
//! agree.

use super::rendezvous::Rendezvous;
use std::time::Duration;

/// Variables of shardlab's own launcher.
pub(super) const OWN_RANK: &str = "SHARDLAB_RANK";
pub(super) const OWN_WORLD: &str = "SHARDLAB_WORLD_SIZE";
pub(super) const OWN_STORE: &str = "SHARDLAB_MEETING";
pub(super) const OWN_RUN: &str = "SHARDLAB_RUN";
/// Environment variable with the port of the store, which overrides the launcher's port.
pub(crate) const PORT: &str = "SHARDLAB_PORT";
/// Default port, which is the same as in PyTorch.
const DEFAULT_PORT: u16 = 29500;
/// Number of ports to try after the first one, which may be in use, for example by torchrun's
/// store.
const MORE_PORTS: u16 = 8;

/// Program that started a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `shardlab exec`.
    Shardlab,
    /// torchrun, or a launcher that sets the same variables.
    Torchrun,
    /// Slurm.
    Srun,
    /// Open MPI.
    OpenMpi,
    /// MPICH, Intel MPI and their derivatives.
    Pmi,
}

impl Launcher {
    /// Returns the name for messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shardlab => "shardlab",
            Self::Torchrun => "torchrun (RANK, WORLD_SIZE)",
            Self::Srun => "srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS)",
            Self::OpenMpi => "mpirun (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)",
            Self::Pmi => "mpiexec (PMI_RANK, PMI_SIZE)",
        }
    }
}

/// Rank of a process, and the rendezvous of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Program that started it.
    pub launcher: Launcher,
    /// Rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Index among the ranks of its host.
    pub local_rank: u32,
    /// Host of the store.
    pub host: String,
    /// Ports that the store may use.
    pub ports: Vec<u16>,
    /// Name that distinguishes runs.
    pub run: String,
}

impl Placement {
    /// Returns where the processes of the run meet.
    #[must_use]
    pub fn rendezvous(&self, timeout: Duration) -> Rendezvous {
        Rendezvous {
            host: self.host.clone(),
            ports: self.ports.clone(),
            process: self.rank,
            processes: self.world,
            run: self.run.clone(),
            timeout,
        }
    }
}

/// Invalid or contradictory environment variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the environment: {0}")]
pub struct EnvironmentError(String);

type Read<T> = Result<T, EnvironmentError>;

/// Reads the rank of this process; `None` if it was not started as one of several.
///
/// # Errors
/// Returns [`EnvironmentError`], which names variables that are missing, not numbers, out of range
/// or contradictory.
pub fn placement() -> Read<Option<Placement>> {
    read(&|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
}

/// Like [`placement`], but reads the variables with `var`.
///
/// # Errors
/// As [`placement`].
pub fn read(var: &dyn Fn(&str) -> Option<String>) -> Read<Option<Placement>> {
    let env = Env(var);
    if let Some(own) = env.own()? {
        return Ok(Some(own));
    }
    let mut found = Vec::new();
    for source in SOURCES {
        if let Some((rank, world)) = env.pair(source)? {
            found.push((source, rank, world));
        }
    }
    // torchrun may itself have been started by another launcher, whose variables describe torchrun
    // and not this process.
    if env.text("TORCHELASTIC_RUN_ID").is_some() {
        found.retain(|(s, ..)| s.launcher == Launcher::Torchrun);
    }
    // If mpirun or mpiexec started the ranks, Slurm's variables describe their daemons, of which
    // there is one per node. srun itself may also set PMI's variables, except for the local rank.
    let pair_of = |launcher| {
        let source = found.iter().find(|f| f.0.launcher == launcher)?;
        Some((source.1, source.2))
    };
    let mpiexec = pair_of(Launcher::Pmi).filter(|_| env.text("MPI_LOCALRANKID").is_some());
    let outer = if mpiexec.or(pair_of(Launcher::OpenMpi)).is_some() {
        Some(Launcher::Srun)
    } else {
        (pair_of(Launcher::Srun) == pair_of(Launcher::Pmi)).then_some(Launcher::Pmi)
    };
    found.retain(|f| Some(f.0.launcher) != outer);
    let Some(&(source, rank, world)) = found.first() else {
        return Ok(None);
    };
    for (other, r, w) in &found[1..] {
        // A launcher with one task (`srun` around a script) does not describe ranks.
        if *w != 1 && (*r, *w) != (rank, world) {
            return Err(EnvironmentError(format!(
                "{} says rank {rank} of {world}, but {} says rank {r} of {w}: unset the variables of one of them",
                source.launcher.name(),
                other.launcher.name()
            )));
        }
    }
    let (source, rank, world) = found
        .iter()
        .find(|f| f.2 != 1)
        .copied()
        .unwrap_or((source, rank, world));
    if rank >= world {
        return Err(EnvironmentError(format!(
            "{}: there is no rank {rank} of {world}",
            source.launcher.name()
        )));
    }
    if world == 1 {
        return Ok(None);
    }
    let local_rank = match env.number(source.local)? {
        Some(local) => local,
        None => env.number("LOCAL_RANK")?.unwrap_or(rank),
    };
    let (host, port) = env.master(source, world)?;
    let mut first = port;
    if source.launcher == Launcher::Torchrun
        && env.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True")
    {
        // torchrun runs its own store on that port.
        first = port.saturating_add(1);
    }
    let run = env.run(source);
    let ports = match env.number(PORT)? {
        Some(p) => vec![port_of(PORT, p)?],
        // Another unnamed run may have its store on the next port.
        None if run.is_empty() => vec![first],
        None => (first..=first.saturating_add(MORE_PORTS)).collect(),
    };
    Ok(Some(Placement {
        launcher: source.launcher,
        rank,
        world,
        local_rank,
        host,
        ports,
        // torchrun's run id is `none` by default, but runs on the same host use different ports.
        // Host names do not identify runs, because ranks may know rank 0's host by several names.
        run: format!("{run}@{port}"),
    }))
}

/// Environment variables of a launcher.
#[derive(Debug)]
struct Source {
    launcher: Launcher,
    rank: &'static str,
    world: &'static str,
    local: &'static str,
    /// Variables that identify the run.
    run: &'static [&'static str],
}

static SOURCES: &[Source] = &[
    Source {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world: "WORLD_SIZE",
        local: "LOCAL_RANK",
        run: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Source {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        run: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Source {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        run: &["HYDRA_BSTRAP_JOBID"],
    },
    Source {
        launcher: Launcher::Srun,
        rank: "SLURM_PROCID",
        // A batch script has SLURM_PROCID and SLURM_NTASKS without being one of several tasks. The
        // step's number of tasks is set only for tasks of `srun`.
        world: "SLURM_STEP_NUM_TASKS",
        local: "SLURM_LOCALID",
        run: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

struct Env<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Env<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    fn number(&self, name: &str) -> Read<Option<u32>> {
        let Some(text) = self.text(name) else {
            return Ok(None);
        };
        let number = text
            .trim()
            .parse()
            .map_err(|_| EnvironmentError(format!("{name} is `{text}`; expected an integer")));
        number.map(Some)
    }

    /// Returns rank and number of ranks if a launcher sets both.
    fn pair(&self, s: &Source) -> Read<Option<(u32, u32)>> {
        match (self.number(s.rank)?, self.number(s.world)?) {
            (Some(rank), Some(world)) => Ok(Some((rank, world))),
            // SLURM_PROCID without the step's tasks belongs to a batch script; Slurm's PMI sets
            // only PMI_RANK.
            (Some(_), None) if s.launcher != Launcher::Torchrun => Ok(None),
            (None, Some(_)) if s.launcher != Launcher::Torchrun => Ok(None),
            (None, None) => Ok(None),
            (Some(_), None) => Err(missing(s.rank, s.world)),
            (None, Some(_)) => Err(missing(s.world, s.rank)),
        }
    }

    fn own(&self) -> Read<Option<Placement>> {
        let Some(rank) = self.number(OWN_RANK)? else {
            return Ok(None);
        };
        let world = self
            .number(OWN_WORLD)?
            .ok_or(missing(OWN_RANK, OWN_WORLD))?;
        let store = self.text(OWN_STORE).ok_or(missing(OWN_RANK, OWN_STORE))?;
        let (host, port) = store
            .rsplit_once(':')
            .and_then(|(h, p)| Some((h.to_owned(), p.parse().ok()?)))
            .ok_or_else(|| {
                EnvironmentError(format!("{OWN_STORE} is `{store}`; expected host:port"))
            })?;
        Ok(Some(Placement {
            launcher: Launcher::Shardlab,
            rank,
            world,
            local_rank: rank,
            host,
            ports: vec![port],
            run: self.text(OWN_RUN).unwrap_or_default(),
        }))
    }

    /// Returns host and port of rank 0.
    fn master(&self, s: &Source, world: u32) -> Read<(String, u16)> {
        let port = match self.number("MASTER_PORT")? {
            Some(p) => port_of("MASTER_PORT", p)?,
            // Jobs of one cluster rarely share both a node and these two digits.
            None => DEFAULT_PORT + (self.number("SLURM_JOB_ID")?.unwrap_or(0) % 64) as u16 * 16,
        };
        if let Some(host) = self.text("MASTER_ADDR") {
            return Ok((host, port));
        }
        let local = match s.launcher {
            Launcher::Srun => {
                if let Some(nodes) = self.text("SLURM_STEP_NODELIST") {
                    return Ok((first_host(&nodes), port));
                }
                None
            }
            Launcher::OpenMpi => self.number("OMPI_COMM_WORLD_LOCAL_SIZE")?,
            Launcher::Pmi => self.number("MPI_LOCALNRANKS")?,
            Launcher::Torchrun | Launcher::Shardlab => None,
        };
        if local == Some(world) {
            return Ok(("127.0.0.1".to_owned(), port));
        }
        Err(EnvironmentError(format!(
            "{} says that there are {world} ranks, but MASTER_ADDR (the host of rank 0) is not set",
            s.launcher.name()
        )))
    }

    fn run(&self, s: &Source) -> String {
        let parts: Vec<String> = s.run.iter().filter_map(|n| self.text(n)).collect();
        parts.join(".")
    }
}

fn missing(is: &str, is_not: &str) -> EnvironmentError {
    EnvironmentError(format!("{is} is set, but {is_not} is not"))
}

fn port_of(name: &str, p: u32) -> Read<u16> {
    u16::try_from(p)
        .ok()
        .filter(|p| *p > 0)
        .ok_or_else(|| EnvironmentError(format!("{name} is {p}; expected a port from 1 to 65535")))
}

/// Returns the first host of a Slurm node list: `node03` for `node[03-05,7],other`.
fn first_host(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[') else {
        return list.split(',').next().unwrap_or(list).to_owned();
    };
    if let Some((first, _)) = prefix.split_once(',') {
        return first.to_owned();
    }
    let numbers = rest.split([']', ',', '-']).next().unwrap_or("");
    let suffix = rest
        .split_once(']')
        .map_or("", |(_, s)| s.split(',').next().unwrap_or(""));
    format!("{prefix}{numbers}{suffix}")
}

#[cfg(test)]
mod tests;
