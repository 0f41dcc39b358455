//! What is released to the device before all cached segments are: old segments
//! (`garbage_collection_threshold`) and oversize segments (`max_split_size`).

use super::{Bytes, CachingAllocator, FreeKey};

impl CachingAllocator {
    /// Returns whether garbage is collected.
    pub(super) fn collects(&self) -> bool {
        self.capacity.is_some() && self.settings.garbage_collection_threshold.is_some()
    }

    /// Releases unused large segments of at least average age to the device until reserved memory
    /// is below the threshold. Age is measured in searches of the pool. (c10
    /// `garbage_collect_cached_blocks`.)
    pub(super) fn collect_garbage(&mut self) {
        let (Some(share), Some(capacity)) =
            (self.settings.garbage_collection_threshold, self.capacity)
        else {
            return;
        };
        let threshold = (share * capacity.0 as f64) as u64;
        let Some(target) = self.counters.reserved.0.checked_sub(threshold) else {
            return;
        };
        let mut whole = self.whole_segments();
        let mut age: u64 = whole.iter().map(|(_, key)| self.age(*key)).sum();
        let mut reclaimed = 0;
        while reclaimed < target && !whole.is_empty() {
            let average = age as f64 / whole.len() as f64;
            let (old, young): (Vec<_>, Vec<_>) = whole
                .into_iter()
                .partition(|(_, key)| self.age(*key) as f64 >= average);
            for (list, key) in old {
                age -= self.age(key);
                reclaimed += key.size();
                self.drop_segment(list, key);
            }
            whole = young;
        }
    }

    /// Releases oversize segments of a list to the device: the smallest one that makes room for
    /// `size`, or else the largest ones until they suffice together. Returns whether they suffice.
    /// (c10 `release_available_cached_blocks`.)
    pub(super) fn release_oversize(&mut self, list: usize, size: u64) -> bool {
        let Some(Bytes(limit)) = self.settings.max_split_size else {
            return false;
        };
        if self.settings.expandable_segments {
            return false;
        }
        let wanted = size.max(limit);
        let free = &self.lists[list].free;
        if let Some(at) = free.lower_bound(&FreeKey::of_size(wanted)) {
            let key = free.get(at);
            if self.is_whole(key.node()) {
                self.drop_segment(list, key);
            }
            return true;
        }
        let mut released = 0;
        while released < wanted {
            let Some(key) = self.lists[list].free.before(&FreeKey::LAST) else {
                break;
            };
            if key.size() < limit || !self.is_whole(key.node()) {
                break;
            }
            released += key.size();
            self.drop_segment(list, key);
        }
        released >= wanted
    }

    /// Returns the unused segments of the large pools with their lists.
    fn whole_segments(&self) -> Vec<(usize, FreeKey)> {
        let large = self.lists.iter().enumerate().step_by(2);
        let keys = large.flat_map(|(list, l)| l.free.iter().map(move |key| (list, key)));
        keys.filter(|(_, key)| self.is_whole(key.node())).collect()
    }

    fn age(&self, key: FreeKey) -> u64 {
        self.searches - self.node(key.node()).free_since
    }
}
