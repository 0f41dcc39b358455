//! Ranks as processes, started here or by torchrun, srun or mpirun.

use super::Failure;
use crate::cli::interrupt;
use crate::cli::output::{Status, say};
use shardlab_exec::process::{
    ControlSignals, Launch, Launcher, Placement, ProcessGroup, StoreOptions, World,
    end_with_launcher, launch, placement,
};
use shardlab_plan::Program;
use std::sync::Arc;
use std::time::Duration;

/// Time for ranks to shut down cleanly after one has failed.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(15);

/// Returns the placement of this process; `None` if it was not started as one of several.
pub(super) fn place() -> Result<Option<Placement>, Failure> {
    let place = placement().map_err(Failure::bad_input)?;
    // A launcher may itself have been started by the dashboard.
    end_with_launcher(|| {});
    Ok(place)
}

/// Returns whether this process reports for the run: a single process, the launcher, or rank 0.
pub(super) fn leads() -> bool {
    placement().map_or(true, |place| place.is_none_or(|p| p.rank == 0))
}

/// Joins the process group. `facts` must be equal in all processes.
pub(super) fn join(
    place: &Placement,
    program: &Program,
    timeout: Duration,
    facts: &[(&str, String)],
) -> Result<World, Failure> {
    if program.meta.mesh.world() != place.world {
        return Err(Failure::bad_input(format_args!(
            "the scenario's mesh has {} ranks, but {} started {} processes",
            program.meta.mesh.world(),
            place.launcher.name(),
            place.world
        )));
    }
    let rendezvous = place.rendezvous(timeout);
    let hosts = place.rank == 0 && place.launcher != Launcher::Shardlab;
    let group = if hosts {
        let options = StoreOptions::new(place.world, &place.run, timeout);
        ProcessGroup::host(&rendezvous, options)
    } else {
        ProcessGroup::connect(&rendezvous)
    };
    let group = Arc::new(group.map_err(Failure::run)?);
    let rank = place.rank;
    group.set_exit_hook(Arc::new(move |cause| {
        say(format_args!(
            "rank {rank} cannot shut down cleanly ({cause})"
        ));
        exit_now();
    }));
    group.check_config(facts).map_err(Failure::run)?;
    World::shared(program, group).map_err(Failure::bad_input)
}

/// Ends the process without running exit handlers, which may hang if a thread is stuck in a driver
/// call.
#[cfg(feature = "cuda")]
fn exit_now() -> ! {
    shardlab_exec::device::cuda::exit_now(Status::RUN_FAILED)
}

/// Ends the process.
#[cfg(not(feature = "cuda"))]
fn exit_now() -> ! {
    std::process::exit(i32::from(Status::RUN_FAILED))
}

/// Starts this command once per rank and waits for all of them.
pub(super) fn start(ranks: u32, timeout: Duration) -> Result<Status, Failure> {
    let program = std::env::current_exe()
        .map_err(|e| Failure::run(format_args!("cannot find this binary: {e}")))?;
    let what = Launch {
        ranks,
        program,
        args: std::env::args_os().skip(1).collect(),
        timeout,
        shutdown_grace: SHUTDOWN_GRACE,
    };
    interrupt::watch();
    interrupt::watch_stops();
    let signals = ControlSignals {
        interrupted: &interrupt::requested,
        suspended: &interrupt::stop_requested,
    };
    let ended = launch(&what, signals)
        .map_err(|e| Failure::run(format_args!("cannot start {ranks} ranks: {e}")))?;
    for (rank, ending) in ended.unreported_kills() {
        say(format_args!("error: rank {rank} {ending}"));
    }
    match (ended.first(), &ended.failure) {
        (None, _) => Ok(Status::Done),
        // Rank 0 has already reported the reason.
        (Some(_), _) if ended.status[0] == i32::from(Status::BAD_INPUT) => {
            Err(Failure::Reported(Status::BAD_INPUT))
        }
        (Some(_), _) if ended.status[0] > 0 => Ok(Status::RunFailed),
        (Some(_), Some((_, cause))) => Err(Failure::run(cause)),
        (Some((rank, status)), None) => Err(Failure::run(format_args!(
            "rank {rank} ended with status {status}"
        ))),
    }
}
