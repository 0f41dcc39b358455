//! Agreement of the processes of a run on the checkpoint to resume from.

use super::TrainError;
use super::checkpoint::{Checkpoint, Store};
use super::error::list;
use super::options::{CheckpointOptions, Observer, Resume};
use crate::process::{ProcessGroup, Reader, Writer};

/// Opens the folder of checkpoints and finds the one to resume from. Process 0 decides and
/// verifies; the other processes open the checkpoint that it has found.
pub(super) fn find(
    peers: &ProcessGroup,
    options: &CheckpointOptions,
    observer: &mut dyn Observer,
) -> Result<(Store, Option<Checkpoint>), TrainError> {
    if peers.process() == 0 {
        let store = Store::open(&options.dir, options.keep)?;
        let found = choose(&store, options.resume, observer)?;
        let from = found.as_ref().map_or(0, |c| c.progress().step);
        let others = store.beyond(from)?;
        if !others.is_empty() {
            observer.note(&format!(
                "{}: training continues from step {from}; the first save moves the checkpoints of steps {} aside (step-N.aside-1)",
                options.dir.display(),
                list(&others)
            ));
        }
        let mut w = Writer::default();
        w.u8(u8::from(found.is_some()));
        w.u64(from);
        peers.broadcast("resume", w.0)?;
        return Ok((store, found));
    }
    let decision = peers.broadcast("resume", Vec::new())?;
    let mut r = Reader(&decision);
    let store = Store::attach(&options.dir, options.keep);
    let found = match (r.u8(), r.u64()) {
        (Some(1), Some(step)) => Some(Checkpoint::open_verified(&store.path(step))?),
        _ => None,
    };
    Ok((store, found))
}

/// Chooses the checkpoint to resume from.
fn choose(
    store: &Store,
    resume: Resume,
    observer: &mut dyn Observer,
) -> Result<Option<Checkpoint>, TrainError> {
    let steps = store.steps()?;
    match resume {
        Resume::Never => Ok(None),
        Resume::Step(step) if steps.contains(&step) => {
            Checkpoint::open(&store.path(step)).map(Some)
        }
        Resume::Step(step) => Err(TrainError::NoCheckpoint {
            path: store.path(step),
            steps,
        }),
        Resume::Auto => {
            let mut first = None;
            for step in steps.iter().rev() {
                match Checkpoint::open(&store.path(*step)) {
                    Ok(found) => return Ok(Some(found)),
                    Err(e) => {
                        observer.note(&format!("{e}; trying the previous checkpoint"));
                        first.get_or_insert(e);
                    }
                }
            }
            // Silently starting over with damaged checkpoints would surprise the user.
            first.map_or(Ok(None), Err)
        }
    }
}
