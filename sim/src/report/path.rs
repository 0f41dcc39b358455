//! The chain of spans that decided when the recorded step ended.

use shardlab_plan::record::{Blocker, Run};

/// Indices into [`Run::spans`] from the first span of the chain to the one that ended last. The chain stops where a span
/// waited for the host or for another rank.
#[must_use]
pub fn critical_path(run: &Run) -> Vec<usize> {
    let mut path = Vec::new();
    let mut at = (0..run.spans.len()).max_by_key(|&i| run.spans[i].end);
    while let Some(i) = at {
        path.push(i);
        at = match run.spans[i].blocker {
            Blocker::Stream(x) | Blocker::Event(x) | Blocker::Communicator(x) => Some(x as usize),
            // The kernel whose end let it start.
            Blocker::Sms => {
                (0..run.spans.len()).find(|&x| x != i && run.spans[x].end == run.spans[i].start)
            }
            Blocker::Host | Blocker::Rank | Blocker::None => None,
        };
        if path.len() > run.spans.len() {
            break;
        }
    }
    path.reverse();
    path
}
