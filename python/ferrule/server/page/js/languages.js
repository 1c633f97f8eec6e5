// Languages of code blocks: for each, the expressions of its comments, strings and numbers, and its keywords.
//
// The expressions cannot backtrack: a repetition and what follows it have no common first character. An unclosed comment
// or string ends with the line or the text.

const LINE_COMMENT = "\\/\\/.*";
const BLOCK_COMMENT = "\\/\\*[^]*?(?:\\*\\/|$(?![^]))";
const HASH_COMMENT = "(?<![^\\s])#.*";
const C_COMMENT = `${LINE_COMMENT}|${BLOCK_COMMENT}`;
const DASH_COMMENT = "--.*";
const DOUBLE_QUOTED = '"(?:\\\\[^]|[^"\\\\\\n])*"?';
const SINGLE_QUOTED = "'(?:\\\\[^]|[^'\\\\\\n])*'?";
const QUOTED = `${DOUBLE_QUOTED}|${SINGLE_QUOTED}`;
const BACK_QUOTED = "`(?:\\\\[^]|[^`\\\\])*`?";
const TRIPLE_QUOTED = '"""[^]*?(?:"""|$(?![^]))|\'\'\'[^]*?(?:\'\'\'|$(?![^]))';
// One character, so that the lifetimes of Rust are not strings.
const CHARACTER = "'(?:\\\\[^\\n]{1,10}?|[^'\\\\\\n])'";
const NUMBER = "(?<![\\w.])(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d[\\d_]*)?(?:[eE][+-]?\\d+)?)(?:[a-zA-Z_]\\w{0,8})?\\b";
const WORD = "[A-Za-z_$][\\w$]*";

const C_WORDS = `break case char const continue default do double else enum extern float for goto if inline int long
  register return short signed sizeof static struct switch typedef union unsigned void volatile while NULL bool true
  false`;
const JAVA_WORDS = `abstract assert boolean break byte case catch char class const continue default do double else enum
  extends final finally float for if implements import instanceof int interface long native new null package private
  protected public record return short static super switch synchronized this throw throws transient true false try var
  void volatile while yield`;
const JAVASCRIPT_WORDS = `async await break case catch class const continue debugger default delete do else export extends
  false finally for from function get if import in instanceof let new null of return set static super switch this throw
  true try typeof undefined var void while with yield`;
const TYPESCRIPT_WORDS = `abstract any as boolean declare enum implements interface is keyof namespace never number object
  private protected public readonly satisfies string symbol type unknown`;
const PYTHON_WORDS = `and as assert async await break case class continue def del elif else except False finally for from
  global if import in is lambda match None nonlocal not or pass raise return self True try while with yield`;
const SHELL_WORDS = `if then else elif fi for while until do done case esac in function return exit export local readonly
  set unset source echo cd sudo alias`;
const SQL_WORDS = `add all alter and as asc between by case check column constraint create cross database default delete
  desc distinct drop else end exists false foreign from full group having if in index inner insert into is join key left
  like limit not null offset on or order outer over partition primary references returning right select set table then
  true union unique update using values view when where with`;

const CODE = { comment: C_COMMENT, string: QUOTED, number: NUMBER, word: WORD };
const SCRIPT = { comment: HASH_COMMENT, string: QUOTED, number: NUMBER, word: WORD };
const MARKUP = {
  comment: "<!--[^]*?(?:-->|$(?![^]))",
  keyword: "<\\/?[A-Za-z!?][\\w:.-]*|\\/?>",
  name: "(?<=\\s)[\\w:@.-]{1,80}(?==)",
  string: "(?<==)(?:\"[^\"]*\"?|'[^']*'?)",
};
const DATA = { comment: HASH_COMMENT, string: `${TRIPLE_QUOTED}|${QUOTED}`, number: NUMBER, word: WORD };
const CONSTANTS = "true false null yes no on off";

/** Languages by name: `{kind: expression, words, aliases, isCaseless}`; a `word` is a keyword if it is in `words`. */
export const LANGUAGES = {
  bash: {
    ...SCRIPT,
    name: "\\$(?:\\w+|\\{[^}\\n]{0,200}\\}|[@#?*!$])",
    string: `${DOUBLE_QUOTED}|'[^']*'?`,
    words: SHELL_WORDS,
    aliases: "sh shell zsh console shell-session dockerfile docker makefile make",
  },
  c: { ...CODE, meta: "^[ \\t]*#\\w+", words: C_WORDS, aliases: "h" },
  cpp: {
    ...CODE,
    meta: "^[ \\t]*#\\w+",
    words: `${C_WORDS} auto catch class concept constexpr delete explicit friend mutable namespace new noexcept nullptr
      operator override private protected public requires template this throw try typename using virtual`,
    aliases: "c++ cc cxx hpp cuda",
  },
  csharp: {
    ...CODE,
    words: `${JAVA_WORDS} as async await base bool decimal delegate event foreach get in internal is lock namespace object
      out override params partial readonly ref sealed set string struct using virtual where`,
    aliases: "cs c#",
  },
  css: {
    comment: C_COMMENT,
    string: QUOTED,
    keyword: "@[\\w-]+|!important",
    number: "#[\\da-fA-F]{3,8}\\b|(?<![\\w-])-?\\d+(?:\\.\\d+)?(?:%|[a-z]{1,5})?",
    name: "[a-zA-Z-]{1,50}(?=[ \\t]*:[ \\t])|--[\\w-]+",
    aliases: "scss less",
  },
  diff: { string: "^\\+.*", deleted: "^-.*", comment: "^@@.*|^(?:diff|index) .*", aliases: "patch" },
  go: {
    ...CODE,
    string: `${QUOTED}|${BACK_QUOTED}`,
    words: `break case chan const continue default defer else fallthrough false for func go goto if import interface iota
      map nil package range return select struct switch true type var string int int64 float64 byte rune bool error`,
    aliases: "golang",
  },
  html: { ...MARKUP, aliases: "xml svg xhtml vue" },
  ini: { ...DATA, comment: "^[ \\t]*[#;].*", keyword: "^[ \\t]*\\[[^\\]\\n]*\\]", words: CONSTANTS, aliases: "cfg conf" },
  java: { ...CODE, string: `${TRIPLE_QUOTED}|${QUOTED}`, meta: "@\\w+", words: JAVA_WORDS },
  javascript: { ...CODE, string: `${QUOTED}|${BACK_QUOTED}`, words: JAVASCRIPT_WORDS, aliases: "js jsx mjs node" },
  json: {
    comment: C_COMMENT,
    name: '"(?:\\\\[^]|[^"\\\\\\n])*"(?=\\s{0,20}:)',
    string: DOUBLE_QUOTED,
    number: NUMBER,
    word: WORD,
    words: CONSTANTS,
    aliases: "jsonc json5 jsonl",
  },
  kotlin: {
    ...CODE,
    string: `${TRIPLE_QUOTED}|${QUOTED}`,
    words: `${JAVA_WORDS} as by companion data fun in init inline internal is lateinit object open out override sealed
      suspend val when where`,
    aliases: "kt",
  },
  lua: {
    ...CODE,
    comment: DASH_COMMENT,
    words: `and break do else elseif end false for function goto if in local nil not or repeat return then true until
      while`,
  },
  php: {
    ...CODE,
    comment: `${C_COMMENT}|${HASH_COMMENT}`,
    name: "\\$\\w+",
    words: `${JAVA_WORDS} array as echo elseif endforeach endif fn foreach function global include match namespace print
      require trait use`,
  },
  python: {
    comment: "#.*",
    string: `[rbfuRBFU]{0,2}(?:${TRIPLE_QUOTED}|${QUOTED})`,
    number: NUMBER,
    meta: "^[ \\t]*@[\\w.]+",
    word: WORD,
    words: PYTHON_WORDS,
    aliases: "py python3 pycon ipython",
  },
  r: { ...SCRIPT, words: "break else FALSE for function if in Inf NA NaN next NULL repeat return TRUE while library" },
  ruby: {
    ...SCRIPT,
    name: "@{1,2}\\w+|(?<!:):\\w+",
    words: `alias and begin break case class def do else elsif end ensure false for if in module next nil not or puts
      redo require rescue retry return self super then true undef unless until when while yield`,
    aliases: "rb",
  },
  rust: {
    ...CODE,
    string: `${DOUBLE_QUOTED}|${CHARACTER}`,
    meta: "#!?\\[[^\\]\\n]{0,200}\\]",
    words: `as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i32 i64 if impl
      in let loop match mod move mut pub ref return self Self static str struct super trait true type u8 u32 u64 unsafe
      use usize where while`,
    aliases: "rs",
  },
  sql: {
    ...CODE,
    comment: `${DASH_COMMENT}|${BLOCK_COMMENT}`,
    words: SQL_WORDS,
    aliases: "sqlite postgresql mysql",
    isCaseless: true,
  },
  swift: {
    ...CODE,
    string: `${TRIPLE_QUOTED}|${DOUBLE_QUOTED}`,
    words: `as associatedtype async await break case catch class continue default defer do else enum extension false
      fileprivate for func guard if import in init inout internal is let nil open override private protocol public return
      self static struct super switch throw throws true try var where while`,
  },
  toml: { ...DATA, keyword: "^[ \\t]*\\[[^\\n]*\\]", name: "(?<=^[ \\t]{0,60})[\\w.-]+(?=[ \\t]*=)", words: CONSTANTS },
  typescript: {
    ...CODE,
    string: `${QUOTED}|${BACK_QUOTED}`,
    words: `${JAVASCRIPT_WORDS} ${TYPESCRIPT_WORDS}`,
    aliases: "ts tsx",
  },
  yaml: {
    ...DATA,
    string: QUOTED,
    name: "(?<=^[ \\t-]{0,60})[\\w./-]+(?=:(?:\\s|$))",
    words: CONSTANTS,
    aliases: "yml",
  },
};
