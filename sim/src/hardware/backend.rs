//! The attention library that a job asks for.

use super::profile::{AttentionTable, Profile};
use shardlab_plan::config::AttentionBackend;
use std::borrow::Cow;

impl Profile {
    /// Returns the profile of this machine with the attention kernels of a library; `None` is the
    /// library that PyTorch picks.
    ///
    /// # Errors
    /// Fails if the profile has no `[[attention_backend]]` for the library.
    pub(crate) fn with_attention(
        &self,
        backend: Option<AttentionBackend>,
    ) -> Result<Cow<'_, Self>, String> {
        let picked = self.efficiency.attention_backend;
        let Some(backend) = backend.filter(|_| backend != picked) else {
            return Ok(Cow::Borrowed(self));
        };
        let mut known = self.attention_backend.iter();
        let rates = known.find(|r| r.backend == backend).ok_or_else(|| {
            let others = self.attention_backend.iter().map(|r| r.backend);
            let known: Vec<&str> = picked.into_iter().chain(others).map(AttentionBackend::name).collect();
            format!(
                "train.attention_backend = \"{}\": hardware profile {} does not know its rates, only \
                 those of {}",
                backend.name(),
                self.name,
                if known.is_empty() { "no library".to_owned() } else { known.join(", ") }
            )
        })?;
        let mut own = self.clone();
        own.efficiency.attention = rates.forward;
        own.efficiency.attention_backward = rates.backward;
        own.attention.retain(|t| t.backend == Some(backend));
        for table in &mut own.attention {
            table.backend = None;
        }
        Ok(Cow::Owned(own))
    }

    /// Returns the tables of the attention library that programs run with.
    pub(crate) fn attention_tables(&self) -> impl Iterator<Item = &AttentionTable> {
        self.attention.iter().filter(|t| t.backend.is_none())
    }
}

#[cfg(test)]
mod tests {
    use crate::hardware::{Profile, load};
    use crate::{Options, SimError, simulate_light};
    use shardlab_plan::scenario::parse;

    fn step(profile: &Profile, set: &[&str]) -> Result<f64, SimError> {
        let set: Vec<String> = set.iter().map(|&s| s.to_owned()).collect();
        let text = "model = { preset = \"llama3-8b\" }\nmesh = { dp_shard = 8, hardware = \"h100-80\" }\nfsdp = { policy = \"fsdp2\" }";
        let scenario = parse("x", text, &set).unwrap();
        let program = shardlab_plan::plan(&scenario).unwrap();
        Ok(simulate_light(&program, profile, &Options::default())?.step_ms())
    }

    /// FlashAttention 2 reaches a little more than half of cuDNN's rate on an H100, so the step
    /// becomes longer by the corresponding time of attention.
    #[test]
    fn each_library_has_its_price() {
        let profile = load("h100-80").unwrap();
        let step = |set: &[&str]| step(&profile, set).unwrap();
        let (auto, flash) = (step(&[]), step(&["train.attention_backend=flash"]));
        let efficient = step(&["train.attention_backend=efficient"]);
        assert!(
            auto * 1.05 < flash && flash * 1.05 < efficient,
            "{auto} {flash} {efficient}"
        );
    }

    #[test]
    fn an_unknown_library_is_refused_with_the_known_ones() {
        let mut profile = load("h100-80").unwrap();
        profile
            .attention_backend
            .retain(|r| r.backend.name() == "flash");
        let error = step(&profile, &["train.attention_backend=triton"]).unwrap_err();
        let message = error.to_string();
        assert!(message.ends_with("only those of cudnn, flash"), "{message}");
    }
}
