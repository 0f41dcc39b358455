//! Steps that either all ranks of a communicator take, or none.

use crate::process::{PeerError, ProcessGroup};

/// The ranks that have to agree, from the point of view of one of them.
pub(super) struct Agreement<'a> {
    pub(super) peers: &'a ProcessGroup,
    /// Name of the communicator's instance, which is unique in the run.
    pub(super) name: String,
    /// World ranks by position.
    pub(super) ranks: &'a [u32],
    pub(super) position: usize,
}

/// Reason why ranks do not take a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// One of the ranks cannot take it. All ranks know this and continue without it.
    Together(String),
    /// The run has failed.
    Run(String),
}

impl Agreement<'_> {
    /// Takes a step. Publishes this rank's result, or the reason why it has none. Returns its own
    /// result, and the published results of all ranks by position.
    ///
    /// # Errors
    /// Returns [`Refusal`] with the reason of the first rank that cannot take the step, which is
    /// equal on all ranks.
    pub(super) fn step<T>(
        &self,
        step: &str,
        mine: Result<(T, Vec<u8>), String>,
    ) -> Result<(T, Vec<Vec<u8>>), Refusal> {
        let key =
            |position: usize| format!("{} {step} of rank {}", self.name, self.ranks[position]);
        let run = |e: PeerError| Refusal::Run(e.to_string());
        let shown = match &mine {
            Ok((_, data)) => Ok(data.clone()),
            Err(why) => Err(why.clone()),
        };
        let others = self.ranks.len() as u32 - 1;
        let put = self
            .peers
            .put_for(&key(self.position), others, pack(shown.clone()));
        put.map_err(run)?;
        let (mut all, mut refused) = (Vec::new(), None);
        for (position, rank) in self.ranks.iter().enumerate() {
            let one = if position == self.position {
                shown.clone()
            } else {
                unpack(&self.peers.get_slow(&key(position)).map_err(run)?)
            };
            match one {
                Ok(data) => all.push(data),
                Err(why) => {
                    refused.get_or_insert(format!("rank {rank}: {why}"));
                }
            }
        }
        match (mine, refused) {
            (Ok((done, _)), None) => Ok((done, all)),
            (_, Some(why)) | (Err(why), None) => Err(Refusal::Together(why)),
        }
    }
}

const HAS: u8 = 1;
const HAS_NOT: u8 = 0;

fn pack(mine: Result<Vec<u8>, String>) -> Vec<u8> {
    let (kind, mut bytes) = match mine {
        Ok(data) => (HAS, data),
        Err(why) => (HAS_NOT, why.into_bytes()),
    };
    bytes.insert(0, kind);
    bytes
}

fn unpack(sent: &[u8]) -> Result<Vec<u8>, String> {
    match sent.split_first() {
        Some((&HAS, data)) => Ok(data.to_vec()),
        Some((_, why)) => Err(String::from_utf8_lossy(why).into_owned()),
        None => Err("it has sent nothing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns each rank's result of a step.
    fn agree(mine: [Result<Vec<u8>, String>; 3]) -> Vec<Result<Vec<Vec<u8>>, Refusal>> {
        let peers = ProcessGroup::single();
        let ranks = [4, 6, 8];
        std::thread::scope(|s| {
            let of = |(position, mine): (usize, Result<Vec<u8>, String>)| {
                let (peers, ranks) = (&peers, &ranks);
                s.spawn(move || {
                    let name = "ep 4".to_owned();
                    let agreement = Agreement {
                        peers,
                        name,
                        ranks,
                        position,
                    };
                    let mine = mine.map(|data| ((), data));
                    agreement.step("windows", mine).map(|(_, all)| all)
                })
            };
            let all: Vec<_> = mine.into_iter().enumerate().map(of).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_have_what_each_has_published() {
        let mine = [1u8, 2, 3].map(|n| Ok(vec![n; usize::from(n)]));
        let all = vec![vec![1], vec![2, 2], vec![3, 3, 3]];
        assert_eq!(agree(mine), [(); 3].map(|()| Ok(all.clone())));
    }

    #[test]
    fn a_rank_that_cannot_is_a_reason_for_all() {
        let mine = [
            Ok(vec![]),
            Err("no NVLink".to_owned()),
            Err("no".to_owned()),
        ];
        let why = Err(Refusal::Together("rank 6: no NVLink".to_owned()));
        assert_eq!(agree(mine), [(); 3].map(|()| why.clone()));
    }
}
