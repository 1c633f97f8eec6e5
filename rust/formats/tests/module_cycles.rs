//! Modules of this crate import downwards only. Cargo refuses cycles between crates; this test refuses them between
//! the modules of one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The modules that each module imports, by path: `gguf::header`. The crate root is the empty path.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Reads the source files below `folder`, whose own module is `module`, as (module, source).
fn sources(folder: &Path, module: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a source folder") {
        let path = entry.expect("a folder entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a UTF-8 name");
        let named = if module.is_empty() { stem.to_owned() } else { format!("{module}::{stem}") };
        if path.is_dir() {
            found.extend(sources(&path, &named));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let module = if matches!(stem, "lib" | "mod") { module.to_owned() } else { named };
            found.push((module, fs::read_to_string(&path).expect("a source file")));
        }
    }
    found
}

/// Returns the code of a file without comments and without its inline test module.
fn code_of(source: &str) -> String {
    let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the paths that a `use` tree names, with its groups expanded: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn expand(tree: &str) -> Vec<String> {
    let Some((prefix, rest)) = tree.split_once('{') else {
        return vec![tree.trim().to_owned()];
    };
    let (mut depth, mut branches) = (0, vec![String::new()]);
    for character in rest.chars() {
        match character {
            '}' if depth == 0 => break,
            ',' if depth == 0 => branches.push(String::new()),
            _ => {
                depth += i32::from(character == '{') - i32::from(character == '}');
                branches.last_mut().expect("a branch").push(character);
            }
        }
    }
    let branches = branches.iter().filter(|branch| !branch.trim().is_empty());
    branches.flat_map(|branch| expand(branch)).map(|path| format!("{}{path}", prefix.trim())).collect()
}

/// Returns the paths after `crate::` and `super::` in a file: in `use` declarations and in expressions.
fn paths(code: &str) -> Vec<String> {
    let starts = ["crate::", "super::"].into_iter().flat_map(|start| code.match_indices(start));
    let is_end = |c: char| !(c.is_alphanumeric() || c == '_' || c == ':');
    let mut found = Vec::new();
    for (at, start) in starts {
        // The second `super` of `super::super::x` belongs to the first.
        if code[..at].ends_with("::") || code[..at].ends_with('$') {
            continue;
        }
        let rest = &code[at..];
        let end = rest.find(is_end).unwrap_or(rest.len());
        if rest[..end].ends_with("::") && rest[end..].starts_with('{') {
            let tree = rest.split(';').next().unwrap_or_default();
            found.extend(expand(tree));
        } else {
            found.push(rest[..end].to_owned());
        }
        debug_assert!(rest.starts_with(start));
    }
    found
}

/// Returns the module that `path` names in `module`, or that it names an item of.
fn resolve(module: &str, path: &str, modules: &BTreeSet<String>) -> String {
    let mut at: Vec<&str> = if module.is_empty() { Vec::new() } else { module.split("::").collect() };
    for segment in path.split("::") {
        match segment {
            "crate" => at.clear(),
            "super" => drop(at.pop()),
            segment => {
                at.push(segment);
                if !modules.contains(&at.join("::")) {
                    at.pop();
                    break;
                }
            }
        }
    }
    at.join("::")
}

fn imports(sources: &[(String, String)]) -> Imports {
    let mut modules: BTreeSet<String> = sources.iter().map(|(module, _)| module.clone()).collect();
    // The file of a declared module may lie outside of the sources (`#[path = "..."]`).
    modules.extend(sources.iter().flat_map(|(module, source)| declared(module, &code_of(source))));
    let mut imports = Imports::new();
    for (module, source) in sources {
        let code = code_of(source);
        let imported = imports.entry(module.clone()).or_default();
        imported.extend(paths(&code).iter().map(|path| resolve(module, path, &modules)));
        // A module re-exports items of the modules that it declares.
        imported.extend(declared(module, &code));
        imported.remove(module);
    }
    imports
}

/// Returns the modules that `module` declares without a body.
fn declared(module: &str, code: &str) -> Vec<String> {
    let names = code.lines().filter_map(|line| line.trim().rsplit_once("mod ")?.1.strip_suffix(';'));
    names.map(|name| if module.is_empty() { name.to_owned() } else { format!("{module}::{name}") }).collect()
}

/// Returns a cycle of imports, if there is one: the first module is repeated at the end.
fn cycle(imports: &Imports) -> Option<Vec<String>> {
    fn visit(module: &str, imports: &Imports, way: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        if let Some(first) = way.iter().position(|visited| visited == module) {
            way.drain(..first);
            way.push(module.to_owned());
            return true;
        }
        if done.contains(module) {
            return false;
        }
        way.push(module.to_owned());
        if imports.get(module).is_some_and(|next| next.iter().any(|next| visit(next, imports, way, done))) {
            return true;
        }
        way.pop();
        done.insert(module.to_owned());
        false
    }
    let (mut way, mut done) = (Vec::new(), BTreeSet::new());
    imports.keys().any(|module| visit(module, imports, &mut way, &mut done)).then_some(way)
}

#[test]
fn modules_import_downwards_only() {
    let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "");
    assert!(sources.len() > 40, "only {} source files found", sources.len());
    let imports = imports(&sources);
    assert!(imports["open"].contains("checkpoint") && imports["checkpoint"].contains("error"), "{imports:?}");
    assert_eq!(cycle(&imports), None, "modules import each other in a circle");
}

#[test]
fn a_cycle_is_found_through_groups_parents_and_expressions() {
    let source = |module: &str, source: &str| (module.to_owned(), source.to_owned());
    let root = source("", "mod a;\nmod b;\n");
    let a = source("a", "mod c;\n// use crate::b::B;\n");
    let downwards =
        [root.clone(), a.clone(), source("a::c", "struct C;"), source("b", "use crate::{a::{C, c::C as D}};")];
    assert_eq!(cycle(&imports(&downwards)), None);
    let outside = [root.clone(), source("a", "mod c;\nmod d;\n"), source("a::c", "use super::d::D;")];
    assert_eq!(cycle(&imports(&outside)), None, "the file of `d` lies elsewhere");
    for upwards in
        ["use super::super::b::B;", "fn f() { crate::b::g() }", "use crate::{\n    b::B,\n};", "use super::X;"]
    {
        let files = [root.clone(), a.clone(), source("a::c", upwards), source("b", "use crate::a::C;")];
        assert!(cycle(&imports(&files)).is_some(), "{upwards}");
    }
}
