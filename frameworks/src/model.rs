//! The model of a job: its config.json on this machine, or a shipped preset of the same name.

use crate::tree::Node;
use crate::yaml;
use std::path::{Path, PathBuf};

/// A model that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    /// Absolute path of its config.json.
    File(PathBuf),
    /// Shipped preset of a published model.
    Preset(&'static str),
}

/// Published models whose shapes are shipped, by the last part of their id without version
/// suffixes.
const PUBLISHED: [(&str, &str); 39] = [
    ("gpt2", "gpt2"),
    ("meta-llama-3-8b", "llama3-8b"),
    ("meta-llama-3.1-8b", "llama3-8b"),
    ("llama-3-8b", "llama3-8b"),
    ("llama-3.1-8b", "llama3-8b"),
    ("meta-llama-3-70b", "llama3-70b"),
    ("meta-llama-3.1-70b", "llama3-70b"),
    ("llama-3.1-70b", "llama3-70b"),
    ("llama-3.3-70b", "llama3-70b"),
    ("llama-3.1-405b", "llama3-405b"),
    ("llama-3.2-1b", "llama3.2-1b"),
    ("llama-3.2-3b", "llama3.2-3b"),
    ("llama-2-7b", "llama2-7b"),
    ("qwen2.5-0.5b", "qwen2.5-0.5b"),
    ("qwen2.5-1.5b", "qwen2.5-1.5b"),
    ("qwen2.5-3b", "qwen2.5-3b"),
    ("qwen2.5-7b", "qwen2.5-7b"),
    ("qwen2.5-14b", "qwen2.5-14b"),
    ("qwen2.5-32b", "qwen2.5-32b"),
    ("qwen2.5-72b", "qwen2.5-72b"),
    ("qwen3-0.6b", "qwen3-0.6b"),
    ("qwen3-1.7b", "qwen3-1.7b"),
    ("qwen3-4b", "qwen3-4b"),
    ("qwen3-8b", "qwen3-8b"),
    ("qwen3-14b", "qwen3-14b"),
    ("qwen3-32b", "qwen3-32b"),
    ("qwen3-30b-a3b", "qwen3-30b-a3b"),
    ("qwen3-235b-a22b", "qwen3-235b-a22b"),
    ("mixtral-8x7b", "mixtral-8x7b"),
    ("gpt-oss-20b", "gpt-oss-20b"),
    ("gpt-oss-120b", "gpt-oss-120b"),
    ("qwen1.5-moe-a2.7b", "qwen1.5-moe-a2.7b"),
    ("deepseek-v3", "deepseek-v3"),
    ("deepseek-v3-0324", "deepseek-v3"),
    ("deepseek-r1", "deepseek-v3"),
    ("deepseek-r1-0528", "deepseek-v3"),
    ("olmoe-1b-7b-0924", "olmoe-1b-7b"),
    ("llama-4-scout-17b-16e", "llama4-scout"),
    ("llama-4-maverick-17b-128e", "llama4-maverick"),
];

/// torchtitan models whose shapes are shipped: family, flavor, preset.
const FLAVORS: [(&str, &str, &str); 18] = [
    ("llama3", "8B", "llama3-8b"),
    ("llama3", "70B", "llama3-70b"),
    ("llama3", "405B", "llama3-405b"),
    ("llama3", "1B", "llama3.2-1b"),
    ("llama3", "3B", "llama3.2-3b"),
    ("qwen3", "0.6B", "qwen3-0.6b"),
    ("qwen3", "1.7B", "qwen3-1.7b"),
    ("qwen3", "4B", "qwen3-4b"),
    ("qwen3", "8B", "qwen3-8b"),
    ("qwen3", "14B", "qwen3-14b"),
    ("qwen3", "32B", "qwen3-32b"),
    ("qwen3", "30B-A3B", "qwen3-30b-a3b"),
    ("qwen3", "235B-A22B", "qwen3-235b-a22b"),
    ("gpt_oss", "20b", "gpt-oss-20b"),
    ("gpt_oss", "120b", "gpt-oss-120b"),
    ("deepseek_v3", "671B", "deepseek-v3"),
    ("llama4", "17bx16e", "llama4-scout"),
    ("llama4", "17bx128e", "llama4-maverick"),
];

/// `model_type` of the shipped presets, by the beginning of their names. Longer beginnings come
/// first.
const TYPES: [(&str, &str); 13] = [
    ("gpt2", "gpt2"),
    ("llama2-", "llama"),
    ("llama3", "llama"),
    ("llama4-", "llama4"),
    ("qwen1.5-moe-", "qwen2_moe"),
    ("qwen2.5-", "qwen2"),
    ("qwen3-30b-a3b", "qwen3_moe"),
    ("qwen3-235b-a22b", "qwen3_moe"),
    ("qwen3-", "qwen3"),
    ("mixtral-", "mixtral"),
    ("gpt-oss-", "gpt_oss"),
    ("deepseek-v3", "deepseek_v3"),
    ("olmoe-", "olmoe"),
];

/// Suffixes of ids that do not change shapes.
const VARIANTS: [&str; 12] = [
    "",
    "-base",
    "-chat",
    "-hf",
    "-chat-hf",
    "-bf16",
    "-merge",
    "-instruct",
    "-instruct-2507",
    "-thinking-2507",
    "-v0.1",
    "-instruct-v0.1",
];

const FILE: &str = "config.json";

/// Finds a model by the name that a configuration gives. Looks for a folder or file relative to the
/// configuration or the working directory, then for a download in `cache`, then for a shipped
/// preset.
pub(crate) fn find(name: &str, folder: &Path, cache: Option<&Path>) -> Option<Model> {
    let local = [folder.join(name), PathBuf::from(name)];
    let local = local.iter().find_map(|path| config_in(path));
    let file = local.or_else(|| downloaded(name, cache?));
    file.map(Model::File)
        .or_else(|| preset(name).map(Model::Preset))
}

/// Returns the absolute path of the config.json that a path refers to.
pub(crate) fn config_in(path: &Path) -> Option<PathBuf> {
    let file = if path.is_dir() {
        path.join(FILE)
    } else {
        path.to_owned()
    };
    let is_json = file.extension().is_some_and(|e| e == "json");
    let found = is_json && file.is_file();
    found.then(|| file.canonicalize().ok()).flatten()
}

/// Returns the config.json of a model in the Hugging Face Hub cache.
fn downloaded(id: &str, cache: &Path) -> Option<PathBuf> {
    if id.contains("..") || id.starts_with('/') {
        return None;
    }
    let repository = cache.join(format!("models--{}", id.replace('/', "--")));
    let snapshots = repository.join("snapshots");
    let main = std::fs::read_to_string(repository.join("refs/main"));
    let main = main.ok().map(|revision| snapshots.join(revision.trim()));
    if let Some(found) = main.and_then(|folder| config_in(&folder)) {
        return Some(found);
    }
    let mut folders: Vec<PathBuf> = std::fs::read_dir(snapshots)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    folders.sort();
    folders.iter().find_map(|folder| config_in(folder))
}

/// Returns the shipped preset of a published model.
pub(crate) fn preset(id: &str) -> Option<&'static str> {
    let name = id
        .trim_end_matches('/')
        .rsplit('/')
        .next()?
        .to_ascii_lowercase();
    let found = PUBLISHED.iter().find(|(published, _)| {
        let rest = name.strip_prefix(published);
        rest.is_some_and(|rest| VARIANTS.contains(&rest))
    });
    found.map(|(_, preset)| *preset)
}

/// Returns the shipped preset of a torchtitan model.
pub(crate) fn flavored(family: &str, flavor: &str) -> Option<&'static str> {
    let is = |(f, v, _): &&(&str, &str, &str)| *f == family && *v == flavor;
    FLAVORS.iter().find(is).map(|(.., preset)| *preset)
}

/// Returns the `model_type` of a model, given as the path of its config.json or the name of a
/// shipped preset. Types of the models inside it follow. Returns nothing if code of the model's
/// folder replaces that of transformers.
pub(crate) fn types(preset: &str) -> Vec<String> {
    if Path::new(preset).extension().is_none_or(|e| e != "json") {
        let shipped = TYPES.iter().find(|(start, _)| preset.starts_with(start));
        return shipped
            .map(|(_, kind)| (*kind).to_owned())
            .into_iter()
            .collect();
    }
    let text = std::fs::read_to_string(preset).ok();
    let root = text.and_then(|text| yaml::parse(preset, &text).ok());
    let Some(root) = root.filter(|root| !root.has("auto_map")) else {
        return Vec::new();
    };
    let inner = root.entries().iter().map(|(_, value)| value);
    let all = std::iter::once(&root).chain(inner);
    let kinds = all.filter_map(|node| node.get("model_type").and_then(Node::text));
    kinds.map(str::to_owned).collect()
}

/// Says what to download for a model that is not on this machine.
pub(crate) fn absent(name: &str) -> String {
    let is_id = name.matches('/').count() == 1 && !name.starts_with(['.', '/', '~']);
    if is_id {
        format!(
            "model `{name}` is not on this machine: download \
             https://huggingface.co/{name}/resolve/main/config.json and name its folder with --model"
        )
    } else {
        format!("no {FILE} is at `{name}`: name the model's folder with --model")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_models_have_presets() {
        assert_eq!(
            preset("meta-llama/Llama-3.2-1B-Instruct"),
            Some("llama3.2-1b")
        );
        assert_eq!(preset("Qwen/Qwen3-4B-Instruct-2507"), Some("qwen3-4b"));
        assert_eq!(preset("NousResearch/Meta-Llama-3.1-8B"), Some("llama3-8b"));
        assert_eq!(preset("openai/gpt-oss-20b"), Some("gpt-oss-20b"));
        assert_eq!(preset("Qwen/Qwen3-235B-A22B"), Some("qwen3-235b-a22b"));
        assert_eq!(preset("deepseek-ai/DeepSeek-V3"), Some("deepseek-v3"));
        assert_eq!(preset("deepseek-ai/DeepSeek-V3-Base"), Some("deepseek-v3"));
        assert_eq!(
            preset("Qwen/Qwen1.5-MoE-A2.7B-Chat"),
            Some("qwen1.5-moe-a2.7b")
        );
        assert_eq!(preset("allenai/OLMoE-1B-7B-0924"), Some("olmoe-1b-7b"));
        assert_eq!(
            preset("meta-llama/Llama-4-Scout-17B-16E-Instruct"),
            Some("llama4-scout")
        );
        assert_eq!(
            preset("meta-llama/Llama-4-Maverick-17B-128E"),
            Some("llama4-maverick")
        );
        // These are other models with similar names.
        for other in [
            "deepseek-ai/DeepSeek-V3.2-Exp",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            "Qwen/Qwen3-Coder-480B-A35B",
            "Qwen/Qwen2.5-7B-VL",
            "x/qwen3-8b-mixture",
        ] {
            assert_eq!(preset(other), None, "{other}");
        }
    }

    #[test]
    fn shipped_presets_and_files_have_types() {
        let shipped = PUBLISHED.iter().map(|(_, preset)| preset);
        for preset in shipped.chain(FLAVORS.iter().map(|(.., preset)| preset)) {
            assert_eq!(types(preset).len(), 1, "{preset}");
        }
        assert_eq!(types("qwen3-235b-a22b"), ["qwen3_moe"]);
        assert_eq!(types("qwen3-14b"), ["qwen3"]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let of = |text: &str| {
            std::fs::write(&file, text).unwrap();
            types(file.to_str().unwrap())
        };
        let inside = r#"{"model_type": "llava", "text_config": {"model_type": "llama"}}"#;
        assert_eq!(of(inside), ["llava", "llama"]);
        let custom = r#"{"model_type": "llama", "auto_map": {"AutoModel": "modeling.Own"}}"#;
        assert!(of(custom).is_empty());
    }

    #[test]
    fn local_files_come_first_then_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let id = "Qwen/Qwen3-8B";
        let snapshot = folder
            .path()
            .join("cache/models--Qwen--Qwen3-8B/snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::write(snapshot.join(FILE), "{}").unwrap();
        let cache = folder.path().join("cache");
        let find = |cache: Option<&Path>| find(id, folder.path(), cache);
        assert_eq!(find(None), Some(Model::Preset("qwen3-8b")));
        let in_cache = snapshot.join(FILE).canonicalize().unwrap();
        assert_eq!(find(Some(&cache)), Some(Model::File(in_cache)));
        let local = folder.path().join(id);
        std::fs::create_dir_all(&local).unwrap();
        std::fs::write(local.join(FILE), "{}").unwrap();
        let local = local.join(FILE).canonicalize().unwrap();
        assert_eq!(find(Some(&cache)), Some(Model::File(local)));
        assert!(absent("a/b").contains("huggingface.co/a/b/resolve/main/config.json"));
        assert!(absent("./x").contains("--model"));
    }
}
