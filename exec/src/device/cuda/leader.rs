//! Choices of kernels that rank 0 makes for all, and whether they fit all.

use crate::device::Setup;
use crate::device::abort::lock;
use crate::kernels::cuda::{Agree, ErrorKind};
use crate::process::{PeerError, Peers, facts};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// One rank's way to rank 0's choices.
#[derive(Debug)]
pub(super) struct Leader {
    peers: Arc<Peers>,
    session: u32,
    rank: u32,
    ranks: u32,
    /// By name. The same product may be asked for again, and its time measured anew could say something else.
    made: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl Leader {
    /// `None` where there is one rank.
    pub(super) fn of(setup: &Setup, rank: u32) -> Option<Arc<Self>> {
        let leader = Self {
            peers: Arc::clone(setup.world.peers()),
            session: setup.session,
            rank,
            ranks: setup.world.size(),
            made: Mutex::default(),
        };
        (leader.ranks > 1).then(|| Arc::new(leader))
    }

    /// Makes sure that the same kernels are right for all ranks: rank 0 compares what they go by. Every rank calls it once,
    /// before the first choice, and no rank goes on before all have.
    ///
    /// # Errors
    /// In words, the same for all.
    pub(super) fn same(&self, mine: &[(&str, String)]) -> Result<(), String> {
        let verdict = format!("verdict on kernels {}", self.session);
        let words = |e: PeerError| e.to_string();
        let mine = facts::text(mine);
        let told = if self.rank > 0 {
            let peers = &self.peers;
            peers
                .put_for(&self.facts_of(self.rank), 1, mine)
                .map_err(words)?;
            peers.get_patiently(&verdict).map_err(words)?
        } else {
            let told = self.compare(mine).unwrap_or_else(words).into_bytes();
            let put = self.peers.put_for(&verdict, self.ranks - 1, told.clone());
            put.map_err(words)?;
            told
        };
        if told.is_empty() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&told).into_owned())
        }
    }

    /// What is wrong with the facts of all ranks, in words; empty for nothing.
    fn compare(&self, mine: Vec<u8>) -> Result<String, PeerError> {
        let others = (1..self.ranks).map(|rank| self.peers.get_patiently(&self.facts_of(rank)));
        let all: Vec<Vec<u8>> = std::iter::once(Ok(mine))
            .chain(others)
            .collect::<Result<_, _>>()?;
        Ok(
            facts::difference(&all).map_or_else(String::new, |difference| {
                format!("{difference}: all ranks need the same GPU, libraries and options")
            }),
        )
    }

    /// Where a rank leaves its facts.
    fn facts_of(&self, rank: u32) -> String {
        format!("facts of kernels {} of rank {rank}", self.session)
    }
}

impl Agree for Leader {
    fn choice(
        &self,
        name: &str,
        choose: &mut dyn FnMut() -> Result<Vec<u8>, ErrorKind>,
    ) -> Result<Vec<u8>, ErrorKind> {
        if let Some(made) = lock(&self.made).get(name) {
            return Ok(made.clone());
        }
        let key = format!("choice {} {name}", self.session);
        let words =
            |e: PeerError| ErrorKind::Ranks(format!("rank 0 published no choice of kernels: {e}"));
        let told = if self.rank > 0 {
            self.peers.get_patiently(&key).map_err(words)?
        } else {
            // The others wait for a refusal as well.
            let told = pack(choose());
            self.peers.put(&key, told.clone()).map_err(words)?;
            told
        };
        let chosen = unpack(&told)?;
        lock(&self.made).insert(name.to_owned(), chosen.clone());
        Ok(chosen)
    }
}

const CHOSEN: u8 = 1;
const REFUSED: u8 = 0;

/// What rank 0 tells of what it chose, or of why there is nothing to choose.
fn pack(choice: Result<Vec<u8>, ErrorKind>) -> Vec<u8> {
    let (kind, mut bytes) = match choice {
        Ok(chosen) => (CHOSEN, chosen),
        Err(why) => (REFUSED, why.to_string().into_bytes()),
    };
    bytes.insert(0, kind);
    bytes
}

fn unpack(told: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    match told.split_first() {
        Some((&CHOSEN, chosen)) => Ok(chosen.to_vec()),
        Some((_, why)) => Err(ErrorKind::Unsupported(
            String::from_utf8_lossy(why).into_owned(),
        )),
        None => Err(ErrorKind::Ranks("rank 0 told nothing".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_four(peers: &Arc<Peers>, rank: u32, session: u32) -> Leader {
        Leader {
            peers: Arc::clone(peers),
            session,
            rank,
            ranks: 4,
            made: Mutex::default(),
        }
    }

    #[test]
    fn a_refusal_of_rank_0s_is_everybodys() {
        let peers = Arc::new(Peers::alone());
        let of = |rank: u32| {
            let leader = one_of_four(&peers, rank, 0);
            leader.choice("conv", &mut || {
                assert_eq!(rank, 0);
                Err(ErrorKind::Library("no engine".to_owned()))
            })
        };
        std::thread::scope(|scope| {
            // They wait before rank 0 comes, and not for long.
            let late: Vec<_> = (1..4).map(|r| scope.spawn(move || of(r))).collect();
            std::thread::sleep(std::time::Duration::from_millis(20));
            let refusal = Err(ErrorKind::Unsupported("no engine".to_owned()));
            assert_eq!(of(0), refusal);
            for rank in late {
                assert_eq!(rank.join().unwrap(), refusal);
            }
        });
    }

    /// What each rank hears where they have these versions of cuDNN.
    fn hear(versions: [&str; 4]) -> Vec<Result<(), String>> {
        let peers = Arc::new(Peers::alone());
        let of = &|rank: u32, version: &str| {
            let leader = one_of_four(&peers, rank, 2);
            leader.same(&[
                ("multiprocessors", "132".to_owned()),
                ("cudnn", version.to_owned()),
            ])
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..)
                .zip(versions)
                .map(|(rank, version)| scope.spawn(move || of(rank, version)))
                .collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_with_other_kernels_end_all_with_the_cause() {
        assert_eq!(hear(["9.19.0"; 4]), [const { Ok(()) }; 4]);
        let off = facts::because("none", "--no-cudnn");
        let missing = facts::because("none", "libcudnn.so.9 was not found");
        assert_eq!(hear([&off, &missing, &off, &off]), [const { Ok(()) }; 4]);
        let cause = "rank 2 has cudnn=none (--no-cudnn), rank 0 has cudnn=9.19.0: all ranks need the same GPU, libraries and options";
        let refused = Err(cause.to_owned());
        assert_eq!(
            hear(["9.19.0", "9.19.0", &off, "9.18.0"]),
            [(); 4].map(|()| refused.clone())
        );
    }

    #[test]
    fn every_rank_has_rank_0s_choice() {
        let peers = Arc::new(Peers::alone());
        let of = |rank: u32, session| {
            let leader = one_of_four(&peers, rank, session);
            let mut asked = 0;
            let mut choice = || {
                leader.choice("m=8", &mut || {
                    asked += 1;
                    Ok(vec![rank as u8, session as u8, asked])
                })
            };
            let first = choice().unwrap();
            assert_eq!(choice().unwrap(), first);
            (first, asked)
        };
        std::thread::scope(|scope| {
            let late: Vec<_> = (1..4).map(|r| scope.spawn(move || of(r, 0))).collect();
            assert_eq!(of(0, 0), (vec![0, 0, 1], 1));
            for rank in late {
                assert_eq!(rank.join().unwrap(), (vec![0, 0, 1], 0));
            }
        });
        // Another session's choices are its own.
        assert_eq!(of(0, 1), (vec![0, 1, 1], 1));
        assert_eq!(of(2, 1), (vec![0, 1, 1], 0));
    }
}
