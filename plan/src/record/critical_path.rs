//! The chain of spans that determines when a recorded step ends.

use super::{Blocker, Run};

impl Run {
    /// Returns indices into [`Run::spans`] from the first span of the chain to the one that ended
    /// last. The chain stops where a span waited for the host or for another rank, or where the
    /// record is damaged.
    #[must_use]
    pub fn critical_path(&self) -> Vec<usize> {
        let spans = &self.spans;
        let mut path = Vec::new();
        let mut seen = vec![false; spans.len()];
        let mut at = (0..spans.len()).max_by_key(|&i| spans[i].end);
        while let Some(i) = at.filter(|&i| i < spans.len()) {
            if std::mem::replace(&mut seen[i], true) {
                break;
            }
            path.push(i);
            at = match spans[i].blocker {
                Blocker::Stream(x) | Blocker::Event(x) | Blocker::Communicator(x) => {
                    Some(x as usize)
                }
                // The kernel whose end allowed it to start.
                Blocker::Sms => {
                    (0..spans.len()).find(|&x| x != i && spans[x].end == spans[i].start)
                }
                Blocker::Host | Blocker::Rank | Blocker::None => None,
            };
        }
        path.reverse();
        path
    }
}
