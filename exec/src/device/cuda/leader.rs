//! Choices of kernels that rank 0 makes for all.

use crate::device::Setup;
use crate::device::abort::lock;
use crate::kernels::cuda::{Agree, Trouble};
use crate::process::Peers;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// One rank's way to rank 0's choices.
#[derive(Debug)]
pub(super) struct Leader {
    peers: Arc<Peers>,
    session: u32,
    rank: u32,
    /// By name. The same product may be asked for again, and its time measured anew could say something else.
    made: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl Leader {
    /// `None` where there is one rank.
    pub(super) fn of(setup: &Setup, rank: u32) -> Option<Arc<dyn Agree>> {
        let leader = Self {
            peers: Arc::clone(setup.world.peers()),
            session: setup.session,
            rank,
            made: Mutex::default(),
        };
        (setup.world.size() > 1).then(|| Arc::new(leader) as Arc<dyn Agree>)
    }
}

impl Agree for Leader {
    fn choice(
        &self,
        name: &str,
        choose: &mut dyn FnMut() -> Result<Vec<u8>, Trouble>,
    ) -> Result<Vec<u8>, Trouble> {
        if let Some(made) = lock(&self.made).get(name) {
            return Ok(made.clone());
        }
        let key = format!("choice {} {name}", self.session);
        let words =
            |e: crate::process::PeerError| Trouble::Ranks(format!("no choice of rank 0's: {e}"));
        let told = if self.rank > 0 {
            self.peers.get(&key).map_err(words)?
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
fn pack(choice: Result<Vec<u8>, Trouble>) -> Vec<u8> {
    let (kind, mut bytes) = match choice {
        Ok(chosen) => (CHOSEN, chosen),
        Err(why) => (REFUSED, why.to_string().into_bytes()),
    };
    bytes.insert(0, kind);
    bytes
}

fn unpack(told: &[u8]) -> Result<Vec<u8>, Trouble> {
    match told.split_first() {
        Some((&CHOSEN, chosen)) => Ok(chosen.to_vec()),
        Some((_, why)) => Err(Trouble::Unsupported(
            String::from_utf8_lossy(why).into_owned(),
        )),
        None => Err(Trouble::Ranks("rank 0 told nothing".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_rank_0s_is_everybodys() {
        let peers = Arc::new(Peers::alone());
        let of = |rank: u32| {
            let leader = Leader {
                peers: Arc::clone(&peers),
                session: 0,
                rank,
                made: Mutex::default(),
            };
            leader.choice("conv", &mut || {
                assert_eq!(rank, 0);
                Err(Trouble::Library("no engine".to_owned()))
            })
        };
        std::thread::scope(|scope| {
            // They wait before rank 0 comes, and not for long.
            let late: Vec<_> = (1..4).map(|r| scope.spawn(move || of(r))).collect();
            std::thread::sleep(std::time::Duration::from_millis(20));
            let refusal = Err(Trouble::Unsupported("no engine".to_owned()));
            assert_eq!(of(0), refusal);
            for rank in late {
                assert_eq!(rank.join().unwrap(), refusal);
            }
        });
    }

    #[test]
    fn every_rank_has_rank_0s_choice() {
        let peers = Arc::new(Peers::alone());
        let of = |rank: u32, session| {
            let leader = Leader {
                peers: Arc::clone(&peers),
                session,
                rank,
                made: Mutex::default(),
            };
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
